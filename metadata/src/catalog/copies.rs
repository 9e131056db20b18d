//! How many copies an object is to have.

use super::codec::{DecodeError, Field, Input};

/// Most copies that can be wanted: one fewer than an object may have, so that a copy can move.
pub const MAX_COPIES: u8 = 15;

/// How many copies an object is to have, and how many a put must bring about so as not to be refused. One byte, which
/// is also its encoding: the number if both are the same (1 to 15), else wanted · 16 + minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies(u8);

impl Copies {
    /// One copy.
    pub const ONE: Self = Self(1);

    /// So many copies, at least so many at once; `None` unless 1 ≤ `minimum` ≤ `wanted` ≤ [`MAX_COPIES`].
    #[must_use]
    pub const fn new(wanted: u8, minimum: u8) -> Option<Self> {
        if minimum == 0 || minimum > wanted || wanted > MAX_COPIES {
            return None;
        }
        Some(if wanted == minimum { Self(wanted) } else { Self(wanted << 4 | minimum) })
    }

    /// How many there are to be.
    #[must_use]
    pub const fn wanted(self) -> u8 {
        if self.0 <= MAX_COPIES { self.0 } else { self.0 >> 4 }
    }

    /// How many a put must have.
    #[must_use]
    pub const fn minimum(self) -> u8 {
        if self.0 <= MAX_COPIES { self.0 } else { self.0 & 0xf }
    }

    /// The same, if it is for no fewer than `wanted`, which is at most [`MAX_COPIES`].
    #[must_use]
    pub(super) fn at_least(self, wanted: u8) -> Self {
        Self::new(wanted.max(self.wanted()), self.minimum()).unwrap_or(self)
    }

    /// The same, if it is for no more than `wanted`, which is not 0.
    #[must_use]
    pub(super) fn at_most(self, wanted: usize) -> Self {
        let wanted = u8::try_from(wanted).unwrap_or(MAX_COPIES).min(self.wanted()).max(1);
        Self::new(wanted, self.minimum().min(wanted)).unwrap_or(self)
    }
}

impl Field for Copies {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(self.0);
    }
    fn read(input: &mut Input<'_>) -> Result<Self, DecodeError> {
        let byte = Self(u8::read(input)?);
        match Self::new(byte.wanted(), byte.minimum()) {
            Some(copies) if copies == byte => Ok(copies),
            _ => Err(DecodeError::Value { what: "copies", value: u64::from(byte.0) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_legal_pair_has_one_byte_and_no_other_byte_is_read() {
        let pairs = (1..=MAX_COPIES).flat_map(|wanted| (1..=wanted).map(move |minimum| (wanted, minimum)));
        let mut legal = vec![false; 256];
        for (wanted, minimum) in pairs {
            let copies = Copies::new(wanted, minimum).expect("legal");
            assert_eq!((copies.wanted(), copies.minimum()), (wanted, minimum));
            let mut out = Vec::new();
            copies.write(&mut out);
            assert_eq!(Copies::read(&mut Input::new(&out)), Ok(copies));
            assert!(!std::mem::replace(&mut legal[usize::from(out[0])], true), "{wanted}, {minimum}");
        }
        let is_read = |byte: u8| Copies::read(&mut Input::new(&[byte])).is_ok();
        assert!((0..=u8::MAX).all(|byte| is_read(byte) == legal[usize::from(byte)]));
        assert_eq!(Copies::new(0, 0).or(Copies::new(1, 0)).or(Copies::new(2, 3)).or(Copies::new(16, 1)), None);
    }
}
