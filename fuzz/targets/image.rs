//! Rows of a catalog's image: a catalog or an error, and a sound one.
#![no_main]

use std::num::NonZero;

use libfuzzer_sys::fuzz_target;
use tidepool_metadata::catalog::Catalog;

const THREADS: NonZero<usize> = NonZero::new(2).expect("not 0");

fuzz_target!(|bytes: &[u8]| {
    let (mut rest, mut rows) = (bytes, Vec::new());
    // A byte of length before each key and each value.
    let take = |rest: &mut &[u8]| {
        let (&length, behind) = rest.split_first()?;
        let (part, behind) = behind.split_at(usize::from(length).min(behind.len()));
        *rest = behind;
        Some(part.to_vec())
    };
    while let (Some(key), Some(value)) = (take(&mut rest), take(&mut rest)) {
        rows.push((key, value));
    }
    // An image has each key once, in order.
    rows.sort();
    rows.dedup_by(|one, other| one.0 == other.0);
    if let Ok(catalog) = Catalog::load(&rows, THREADS) {
        catalog.validate();
    }
});
