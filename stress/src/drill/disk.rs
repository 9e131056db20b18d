//! A small file system of its own for each node's data folder, which can be filled and stalled: ext4 in a file, on a loop
//! device. Needs root, loop devices, `mkfs.ext4` and `fsfreeze`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::DrillError;
use super::network::run;

/// Room for a node's catalog, its log and its lines to standard error, several times over.
const BYTES: u64 = 512 << 20;

/// The file that takes what is free.
const FILLER: &str = "filler";

/// A mounted file system; it goes with this.
pub(super) struct Disk {
    mounted: PathBuf,
    image: PathBuf,
}

/// Why there can be no such file system; `None` if there can.
pub(super) fn why_not() -> Option<&'static str> {
    let has = |tool: &str| {
        let status = Command::new(tool).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok()
    };
    if !rustix::process::geteuid().is_root() {
        return Some("needs root");
    }
    if !(has("mkfs.ext4") && has("fsfreeze") && has("mount")) {
        return Some("needs mkfs.ext4, fsfreeze and mount");
    }
    let made = tempfile::tempdir().map_err(DrillError::from).and_then(|folder| Disk::new(&folder.path().join("disk")));
    if made.is_ok() { None } else { Some("needs loop devices and mounts") }
}

impl Disk {
    /// Makes one at `folder`.
    pub(super) fn new(folder: &Path) -> Result<Self, DrillError> {
        std::fs::create_dir_all(folder)?;
        let image = folder.with_extension("image");
        File::create(&image)?.set_len(BYTES)?;
        let (place, at) = (image.display().to_string(), folder.display().to_string());
        run("mkfs.ext4", &["-q", "-F", "-m", "0", &place])?;
        let disk = Self { mounted: folder.to_owned(), image };
        run("mount", &["-o", "loop", &place, &at])?;
        Ok(disk)
    }

    /// Takes all that is free.
    pub(super) fn fill(&self) -> Result<(), DrillError> {
        let file = File::create(self.mounted.join(FILLER))?;
        let mut length = 0;
        let mut step = BYTES;
        // Whole pieces of half the size each, until not even a page fits.
        while step >= 4096 {
            let free = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), length, step);
            match free {
                Ok(()) => length += step,
                Err(rustix::io::Errno::NOSPC) => step /= 2,
                Err(error) => return Err(std::io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    /// Gives it back.
    pub(super) fn empty(&self) -> Result<(), DrillError> {
        Ok(std::fs::remove_file(self.mounted.join(FILLER))?)
    }

    /// From here on every write waits.
    pub(super) fn stall(&self) -> Result<(), DrillError> {
        run("fsfreeze", &["-f", &self.mounted.display().to_string()])
    }

    /// Writes go on.
    pub(super) fn go_on(&self) -> Result<(), DrillError> {
        run("fsfreeze", &["-u", &self.mounted.display().to_string()])
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let at = self.mounted.display().to_string();
        // Not stalled, not mounted: nothing to do.
        let _not_stalled = run("fsfreeze", &["-u", &at]);
        let _not_mounted = run("umount", &["-l", &at]);
        let _gone = std::fs::remove_file(&self.image);
    }
}
