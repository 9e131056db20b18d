//! Keys on the command line: text, or bytes as `hex:..`.

use std::str::FromStr;

use tidepool_metadata::ObjectKey;

/// A key as it was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyArgument(pub(super) ObjectKey);

impl FromStr for KeyArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = key_bytes(text)?;
        ObjectKey::new(&bytes).map(Self).map_err(|error| error.to_string())
    }
}

/// The bytes that `text` means: its own, or those of `hex:..`.
pub(super) fn key_bytes(text: &str) -> Result<Vec<u8>, String> {
    let Some(digits) = text.strip_prefix("hex:") else { return Ok(text.as_bytes().to_vec()) };
    if !digits.len().is_multiple_of(2) || digits.contains(|digit: char| !digit.is_ascii_hexdigit()) {
        return Err(format!("{text:?} is not hex: followed by pairs of hexadecimal digits"));
    }
    let value = |digit: u8| (digit as char).to_digit(16).unwrap_or(0) as u8;
    Ok(digits.as_bytes().chunks_exact(2).map(|pair| value(pair[0]) << 4 | value(pair[1])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_typed() {
        for bytes in [&b"block/17"[..], &[0xff, 0x00], b"hex:zz", b"line\nbreak", "ключ".as_bytes()] {
            let key = ObjectKey::new(bytes).expect("legal key");
            assert_eq!(key.to_string().parse(), Ok(KeyArgument(key)));
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_shown_of_any_key_is_that_key(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 1..20)) {
            for bytes in [bytes.clone(), [b"hex:", &bytes[..]].concat()] {
                let key = ObjectKey::new(&bytes).expect("legal key");
                assert_eq!(key.to_string().parse(), Ok(KeyArgument(key)));
            }
        }
    }

    #[test]
    fn what_is_no_key_is_refused() {
        for text in ["", "hex:", "hex:abc", "hex:zz", "hex:+1", "hex:äö", &"x".repeat(1025)] {
            assert!(text.parse::<KeyArgument>().is_err(), "{text}");
        }
    }
}
