//! The disk under the NVMe tier: space, direct I/O, io_uring, speed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tidepool_tiers::io::{Block, PAGE_BYTES, UringEngine};

use super::super::output::{rate, size};
use super::Finding;
use super::Verdict::{Bad, Good, Note};
use crate::config::{Config, DirectIo, NvmeEngine};
use crate::plan;

/// The speed is measured for so long each way, or over so many bytes.
const MEASURE: Duration = Duration::from_millis(500);
const MEASURE_BYTES: u64 = 256 << 20;
const PIECE_BYTES: usize = 4 << 20;

pub(super) fn look(config: &Config, quick: bool) -> Vec<Finding> {
    let data = config.data.clone().unwrap_or_else(plan::default_data_folder);
    let folder = config.nvme.path.clone().unwrap_or_else(|| data.join("nvme"));
    let mut findings = vec![writable(&data)];
    if !config.nvme.enabled {
        findings.push(Finding::new(Good, "NVMe tier", "nvme.enabled = false", "objects live in DRAM only"));
        return findings;
    }
    let existing = existing(&folder);
    findings.push(space(config, existing));
    let scratch = Scratch(existing.join(format!(".tidepool-doctor-{}", std::process::id())));
    findings.push(direct(config, &scratch));
    findings.push(uring(config, &scratch));
    if !quick {
        findings.push(speed(&scratch));
    }
    findings
}

/// The folder, or the nearest one above it that exists.
fn existing(folder: &Path) -> &Path {
    folder.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/"))
}

/// A file that is gone when the doctor has gone.
struct Scratch(PathBuf);

impl Scratch {
    fn open(&self, direct: bool) -> io::Result<File> {
        let flags = if direct { libc::O_DIRECT } else { 0 };
        OpenOptions::new().create(true).truncate(false).read(true).write(true).custom_flags(flags).open(&self.0)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // It may never have been made.
        let _absent = std::fs::remove_file(&self.0);
    }
}

fn writable(data: &Path) -> Finding {
    let folder = existing(data);
    let scratch = Scratch(folder.join(format!(".tidepool-doctor-{}", std::process::id())));
    let found = data.display().to_string();
    match scratch.open(false) {
        Ok(_) if folder == data => Finding::new(Good, "data", found, "exists and can be written"),
        Ok(_) => Finding::new(Good, "data", found, "does not exist yet; it can be made"),
        Err(error) => {
            let follows = format!("{} can't be written ({error}): choose another folder with --data", folder.display());
            Finding::new(Bad, "data", found, follows)
        }
    }
}

fn space(config: &Config, folder: &Path) -> Finding {
    const WHAT: &str = "disk space";
    let Ok(space) = rustix::fs::statvfs(folder) else {
        return Finding::new(Bad, WHAT, format!("{} can't be looked at", folder.display()), "set nvme.path");
    };
    let free = space.f_bavail * space.f_frsize;
    let found = format!("{}: {} free", folder.display(), size(free));
    match config.nvme.capacity {
        Some(capacity) if capacity.0 > free => {
            Finding::new(Bad, WHAT, found, format!("nvme.capacity = {capacity} does not fit: lower it"))
        }
        Some(capacity) => Finding::new(Good, WHAT, found, format!("nvme.capacity = {capacity} fits")),
        None => {
            let lent = (free / 10).min(32 << 30);
            let least = 8 * config.nvme.region_bytes.0 + (1 << 20);
            if lent < least {
                let follows = format!("a tenth of it is less than 8 regions ({}): set nvme.capacity", size(least));
                return Finding::new(Bad, WHAT, found, follows);
            }
            Finding::new(Good, WHAT, found, format!("a new NVMe tier takes {} by default", size(lent)))
        }
    }
}

/// Tries what the tier does: pages, page-aligned; then the smaller unit that some disks take.
fn direct(config: &Config, scratch: &Scratch) -> Finding {
    const WHAT: &str = "O_DIRECT";
    let demanded = config.nvme.direct == DirectIo::On;
    let attempt = |bytes: usize| -> io::Result<()> {
        let file = scratch.open(true)?;
        let mut block = Block::new(PAGE_BYTES);
        block.truncate(bytes);
        file.write_all_at(&block, 0)?;
        file.read_exact_at(&mut block, 0)
    };
    match attempt(PAGE_BYTES) {
        Ok(()) => {
            let unit = if attempt(512).is_ok() { 512 } else { PAGE_BYTES };
            let found = format!("works in units of {unit} bytes");
            Finding::new(Good, WHAT, found, format!("the page cache is passed by, in units of {PAGE_BYTES} bytes"))
        }
        Err(error) if demanded => {
            Finding::new(Bad, WHAT, error.to_string(), "nvme.direct = on can't be met: set auto, or another nvme.path")
        }
        Err(error) => Finding::new(Note, WHAT, error.to_string(), "the page cache is used: memory is spent twice"),
    }
}

fn uring(config: &Config, scratch: &Scratch) -> Finding {
    const WHAT: &str = "io_uring";
    let started = scratch.open(false).and_then(|file| UringEngine::start(file, &[], 8));
    match started {
        Ok(_) => Finding::new(Good, WHAT, "works", "the NVMe tier uses it"),
        Err(error) if config.nvme.engine == NvmeEngine::IoUring => {
            Finding::new(Bad, WHAT, error.to_string(), "nvme.engine = io_uring can't be met: set auto, or allow it")
        }
        Err(error) => {
            let why = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "forbidden (a container's seccomp filter, or kernel.io_uring_disabled)"
                }
                _ => "not there",
            };
            Finding::new(Note, WHAT, format!("{why}: {error}"), "the NVMe tier uses threads instead")
        }
    }
}

/// Sequential, direct if that works, one piece at a time: a lower bound of what the tier reaches.
fn speed(scratch: &Scratch) -> Finding {
    const WHAT: &str = "disk speed";
    let measure = || -> io::Result<(f64, f64)> {
        let file = scratch.open(true).or_else(|_| scratch.open(false))?;
        let mut block = Block::new(PIECE_BYTES);
        // Bytes that no disk can compress.
        tidepool_client::workload::Payload::of(1).fill(&mut block);
        let (started, mut written) = (Instant::now(), 0);
        while started.elapsed() < MEASURE && written < MEASURE_BYTES {
            file.write_all_at(&block, written)?;
            written += PIECE_BYTES as u64;
        }
        file.sync_data()?;
        let write = written as f64 / started.elapsed().as_secs_f64();
        let (started, mut read) = (Instant::now(), 0);
        while started.elapsed() < MEASURE && read < written {
            file.read_exact_at(&mut block, read)?;
            read += PIECE_BYTES as u64;
        }
        Ok((write, read as f64 / started.elapsed().as_secs_f64()))
    };
    match measure() {
        Ok((write, read)) => {
            let found = format!("write {}, read {}", rate(write), rate(read));
            let slow = write < 200e6 || read < 200e6;
            let follows =
                if slow { "slow: demotion can hold puts back" } else { "fast enough to take what leaves DRAM" };
            Finding::new(if slow { Note } else { Good }, WHAT, found, follows)
        }
        Err(error) => {
            Finding::new(Bad, WHAT, error.to_string(), "the disk does not take 256 MiB: free some, or set nvme.path")
        }
    }
}
