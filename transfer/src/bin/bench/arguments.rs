//! `--name value` arguments: few enough that a parser would be more than they are.

use std::collections::HashMap;

use tidepool_transfer::{Completion, RdmaSettings, Settings};

use crate::Error;

/// What was given.
pub(crate) struct Arguments(HashMap<String, String>);

impl Arguments {
    pub(crate) fn parse(mut given: impl Iterator<Item = String>) -> Result<Self, Error> {
        let mut known = HashMap::new();
        while let Some(name) = given.next() {
            let name = name.strip_prefix("--").ok_or_else(|| format!("{name:?} is no --option"))?.to_owned();
            let value =
                if name == "verify" { String::new() } else { given.next().ok_or(format!("--{name} of what?"))? };
            known.insert(name, value);
        }
        Ok(Self(known))
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// A number, with K, M or G for powers of 1024.
    pub(crate) fn number(&self, name: &str, default: u64) -> Result<u64, Error> {
        self.text(name).map_or(Ok(default), |text| parse_number(text).ok_or_else(|| format!("--{name} {text}?").into()))
    }

    pub(crate) fn seconds(&self, name: &str, default: f64) -> Result<f64, Error> {
        self.text(name).map_or(Ok(default), |text| Ok(text.parse()?))
    }
}

impl Arguments {
    /// What an engine is told: which RDMA devices, and how it waits for them.
    pub(crate) fn settings(&self) -> Result<Settings, Error> {
        let devices = self.text("devices").map(|names| names.split(',').map(str::to_owned).collect());
        let completion = match self.text("completion") {
            None | Some("event") => Completion::Event,
            Some("poll") => Completion::Poll,
            Some(other) => return Err(format!("--completion {other}?").into()),
        };
        let usual = Settings::default();
        let piece_bytes = self.number("piece", usual.rdma.piece_bytes)?;
        let devices = devices.unwrap_or_default();
        let rdma = RdmaSettings { devices, completion, piece_bytes, ..RdmaSettings::default() };
        let piece_bytes = self.number("piece", usual.piece_bytes)?;
        Ok(Settings { rdma, piece_bytes, window_bytes: usual.window_bytes.max(piece_bytes), ..usual })
    }
}

fn parse_number(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_take_suffixes() {
        assert_eq!(parse_number("4K"), Some(4096));
        assert_eq!(parse_number("1G"), Some(1 << 30));
        assert_eq!(parse_number("17"), Some(17));
        assert_eq!(parse_number("1KK"), None);
        assert_eq!(parse_number("99999999999999999999"), None);
    }
}
