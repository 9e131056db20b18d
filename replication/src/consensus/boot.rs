//! Whether the host lost what the kernel had: decides how much damage at the log's end is to be expected.
//!
//! With `durability = os`, and in a group of one ([`super::Outlives`]), entries lie in the page cache for a while. After a
//! loss of power pages of the log's end may be missing in any order; what is whole before the first hole is all that is left,
//! and nothing of what is not was promised to outlive this. The same damage after a mere restart of the process, or where
//! all is synced, means a broken disk.
//!
//! The file `boot` in the group's folder has the durability (`f` or `o`; `o` also of a group of one) and the boot id of the
//! last start or change between the two.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use super::config::Durability;
use crate::error::GroupError;

const FILE: &str = "boot";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// True if the log was not always synced, and the host has booted since.
pub(super) fn lost_page_cache(folder: &Path) -> Result<bool, GroupError> {
    let error = |source| GroupError::Folder { path: folder.join(FILE), source };
    let last = match fs::read_to_string(folder.join(FILE)) {
        Ok(last) => last,
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(error(source)),
    };
    let boot_id = fs::read_to_string(BOOT_ID).map_err(error)?;
    Ok(last.strip_prefix('o').is_some_and(|last| last != boot_id))
}

/// Notes how the log is synced from now on, durably: before anything is written that may be lost, and once nothing is.
pub(super) fn note(folder: &Path, durability: Durability) -> Result<(), GroupError> {
    let write = || {
        let letter = if durability == Durability::Os { 'o' } else { 'f' };
        let line = format!("{letter}{}", fs::read_to_string(BOOT_ID)?);
        if fs::read_to_string(folder.join(FILE)).is_ok_and(|last| last == line) {
            return Ok(());
        }
        let temporary = folder.join("boot.new");
        let mut file = File::create(&temporary)?;
        file.write_all(line.as_bytes())?;
        file.sync_all()?;
        fs::rename(temporary, folder.join(FILE))?;
        File::open(folder)?.sync_all()
    };
    write().map_err(|source| GroupError::Folder { path: folder.join(FILE), source })
}
