//! Sizes and periods as people write them: `4GiB`, `64 KiB`, `20s`, `100ms`.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Bytes. In files: a number, or text with a binary unit (`KiB`, `MiB`, `GiB`, `TiB`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// A span of time. In files: text with a unit (`ms`, `s`, `m`, `h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(pub Duration);

impl Period {
    /// So many seconds.
    #[must_use]
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }
}

const SIZES: [(&str, u64); 5] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
/// `ms` before `m` and `s`: the longest unit that fits is the one meant.
const PERIODS: [(&str, u64); 4] = [("ms", 1), ("h", 3_600_000), ("m", 60_000), ("s", 1000)];

fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let (number, scale) = units
        .iter()
        .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)))
        .filter(|(number, _)| !number.is_empty())?;
    number.trim().replace('_', "").parse::<u64>().ok()?.checked_mul(scale)
}

fn print(value: u64, units: &[(&str, u64)]) -> String {
    let exact = units.iter().filter(|(_, scale)| value >= *scale && value.is_multiple_of(*scale));
    match exact.max_by_key(|(_, scale)| *scale) {
        Some((unit, scale)) => format!("{}{unit}", value / scale),
        None => format!("{value}{}", units.iter().min_by_key(|(_, scale)| *scale).map_or("", |(unit, _)| unit)),
    }
}

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = text.trim().replace('_', "").parse().ok().or_else(|| parse(text, &SIZES));
        bytes
            .map(Self)
            .ok_or_else(|| format!("{text:?} is no size: write bytes, or a number with KiB, MiB, GiB or TiB"))
    }
}

impl std::str::FromStr for Period {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let millis = parse(text, &PERIODS);
        let period = millis.map(|millis| Self(Duration::from_millis(millis)));
        period.ok_or_else(|| format!("{text:?} is no period: write a number with ms, s, m or h"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print(self.0, &SIZES))
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print(u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX), &PERIODS))
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Period {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => Ok(Self(bytes)),
            Written::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_can_be_read_back() {
        for bytes in [0, 1, 1000, 1 << 10, 3 << 20, (1 << 30) + 1, 5 << 40] {
            assert_eq!(Size(bytes).to_string().parse(), Ok(Size(bytes)));
        }
        for millis in [0, 1, 999, 1000, 90_000, 3_600_000] {
            let period = Period(Duration::from_millis(millis));
            assert_eq!(period.to_string().parse(), Ok(period));
        }
        assert_eq!("64 KiB".parse(), Ok(Size(65536)));
        assert_eq!("100ms".parse(), Ok(Period(Duration::from_millis(100))));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "GiB", "-1", "1.5GiB", "4GB", "99999999TiB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        assert!("20".parse::<Period>().is_err());
    }
}
