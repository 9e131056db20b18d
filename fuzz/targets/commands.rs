//! Commands of the log: what can be read is written back as it was, and is applied by every voter without a panic to a
//! catalog that stays sound and whose image is the same catalog.
#![no_main]

use std::num::NonZero;

use libfuzzer_sys::fuzz_target;
use tidepool_metadata::catalog::{Catalog, Command, EntryContext};
use tidepool_metadata::{LogIndex, LogTime, Term};

fuzz_target!(|bytes: &[u8]| {
    let mut catalog = Catalog::new();
    let (mut rest, mut index) = (bytes, 0);
    // Two bytes of length before each.
    while let Some((length, behind)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length)).min(behind.len());
        let (command, behind) = behind.split_at(length);
        rest = behind;
        let Ok(command) = Command::decode(command) else { continue };
        let mut again = Vec::new();
        command.encode(&mut again);
        assert_eq!(Command::decode(&again).as_ref(), Ok(&command));
        index += 1;
        catalog.apply(EntryContext { index: LogIndex(index), term: Term(1), time: LogTime(index * 1000) }, &command);
    }
    if index > 0 {
        catalog.validate();
        let loaded = Catalog::load(&catalog.rows(), NonZero::<usize>::MIN).expect("its own image");
        assert_eq!(loaded.rows(), catalog.rows());
    }
});
