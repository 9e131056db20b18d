//! Snapshots: the image of one member becomes that of another that is too far behind for the log.
//!
//! Raft's snapshot is only a handle. The follower asks its sender for a copy of its image, which costs that one some hard
//! links, and fetches the copy's files in parts over a connection of their own, so that neither heartbeats nor entries
//! wait. A part that is lost is asked for again; files that are there stay. Then it loads the state from them, and only then
//! Raft hears of the snapshot: putting it in place takes a moment.
//!
//! ```text
//!   image.new/ (parts) ──> whole, marked `s` ──> [image -> image.old, image.new -> image] ──> log emptied
//!     crash: dropped         crash: dropped        crash: put back, or finished               done
//! ```
//!
//! What was copied and is not asked for is removed after a minute.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::calls::Calls;
use super::image::Image;
use super::log::Position;
use super::machine::StateMachine;
use super::member::{MemberId, Members};
use super::shared::{Applied, Shared};
use crate::error::GroupError;

/// Bytes of one part: what is written, synced and given at a time, so that other syncs of the same disks wait little for it.
const PART_BYTES: u64 = 256 << 10;
/// How much the fetching thread stands back (setpriority(2), of which 19 is the most): its node may serve meanwhile.
const NICE: i32 = 10;
/// How long an unused copy is kept.
const KEEP: Duration = Duration::from_secs(60);
/// How long one part may take, and how often it is asked for.
const PART_TIMEOUT: Duration = Duration::from_secs(3);
const PART_ATTEMPTS: u32 = 5;
/// Most files of one copy.
const FILES: usize = 100_000;

/// First byte of a question to the other side of this module.
pub(super) const QUESTION: u8 = 0;
const BEGIN: u8 = 0;
const PART: u8 = 1;

/// A copy that is given out.
struct Offer {
    number: u64,
    folder: PathBuf,
    files: Vec<(String, u64)>,
    used: Instant,
}

/// The giving side.
pub(super) struct Offers {
    folder: PathBuf,
    image: Arc<Mutex<Option<Image>>>,
    state: Mutex<(u64, Vec<Offer>)>,
}

impl Offers {
    pub(super) fn new(folder: &Path, image: Arc<Mutex<Option<Image>>>) -> Self {
        // Numbers of an earlier life must not be taken for these.
        let first = super::clock::boot_nanos();
        Self { folder: folder.to_owned(), image, state: Mutex::new((first, Vec::new())) }
    }

    /// Answers a question of the taking side; empty if it can't be answered. Reads files: not for a thread of the runtime.
    pub(super) fn answer(&self, question: &[u8], members: impl FnOnce() -> Members) -> Vec<u8> {
        let answer = match question.split_first() {
            Some((&BEGIN, [])) => self.begin(members),
            Some((&PART, rest)) => self.part(rest),
            _ => Ok(None),
        };
        answer
            .unwrap_or_else(|error| {
                tracing::error!(%error, "give a snapshot");
                None
            })
            .unwrap_or_default()
    }

    fn begin(&self, members: impl FnOnce() -> Members) -> Result<Option<Vec<u8>>, GroupError> {
        let mut state = self.state.lock();
        let (number, offers) = &mut *state;
        offers.retain(|offer| offer.used.elapsed() < KEEP || fs::remove_dir_all(&offer.folder).is_err());
        *number += 1;
        let folder = self.folder.join(format!("offer-{number}"));
        let Some(position) = self.image.lock().as_ref().map(|image| image.copy_to(&folder)).transpose()?.flatten()
        else {
            return Ok(None);
        };
        let listed = list(&folder).map_err(|source| GroupError::Folder { path: folder.clone(), source })?;
        let mut answer = number.to_le_bytes().to_vec();
        for value in [position.index, position.term] {
            answer.extend_from_slice(&value.to_le_bytes());
        }
        // After the copy: whatever change of members is in it, these have.
        let members = members().encode();
        answer.extend_from_slice(&(members.len() as u64).to_le_bytes());
        answer.extend_from_slice(&members);
        for (name, length) in &listed {
            answer.extend_from_slice(&length.to_le_bytes());
            answer.push(u8::try_from(name.len()).unwrap_or(0));
            answer.extend_from_slice(name.as_bytes());
        }
        tracing::info!(index = position.index, files = listed.len(), "a snapshot is given to a member");
        offers.push(Offer { number: *number, folder, files: listed, used: Instant::now() });
        Ok(Some(answer))
    }

    fn part(&self, question: &[u8]) -> Result<Option<Vec<u8>>, GroupError> {
        let Ok(question) = <[u8; 24]>::try_from(question) else { return Ok(None) };
        let number = |at: usize| u64::from_le_bytes(question[at..at + 8].try_into().expect("8 bytes"));
        let (offer, file, offset) = (number(0), number(8), number(16));
        let path = {
            let mut state = self.state.lock();
            let Some(offer) = state.1.iter_mut().find(|known| known.number == offer) else { return Ok(None) };
            offer.used = Instant::now();
            let name = usize::try_from(file).ok().and_then(|file| offer.files.get(file));
            let Some((name, _)) = name else { return Ok(None) };
            offer.folder.join(name)
        };
        let read = || {
            let mut source = File::open(&path)?;
            source.seek(SeekFrom::Start(offset))?;
            let mut bytes = vec![0; 4];
            source.take(PART_BYTES).read_to_end(&mut bytes)?;
            let checksum = crc32fast::hash(&bytes[4..]);
            bytes[..4].copy_from_slice(&checksum.to_le_bytes());
            Ok(bytes)
        };
        read().map(Some).map_err(|source| GroupError::Folder { path: path.clone(), source })
    }
}

/// Names and lengths of the files in a folder.
fn list(folder: &Path) -> std::io::Result<Vec<(String, u64)>> {
    let mut files = Vec::new();
    for file in fs::read_dir(folder)? {
        let file = file?;
        files.push((file.file_name().to_string_lossy().into_owned(), file.metadata()?.len()));
    }
    Ok(files)
}

/// The taking side: one fetch at a time, on a thread of its own.
pub(super) struct Fetcher<S> {
    calls: Arc<Calls>,
    staged: Arc<Mutex<Option<Applied<S>>>>,
}

impl<S: StateMachine> Fetcher<S> {
    pub(super) fn new(calls: Arc<Calls>) -> Self {
        Self { calls, staged: Arc::default() }
    }

    /// Fetches and loads; the inbox hears how it ended.
    pub(super) fn begin(&self, shared: &Arc<Shared<S>>, source: MemberId) {
        let (calls, staged, owner) = (Arc::clone(&self.calls), Arc::clone(&self.staged), Arc::clone(shared));
        let fetch = move || {
            // Of this thread alone, on Linux.
            if let Err(error) = rustix::process::setpriority_process(None, NICE) {
                tracing::debug!(%error, "a snapshot is fetched at the usual priority");
            }
            let found = fetch(&owner, &calls, source).unwrap_or_else(|error| {
                tracing::warn!(%error, "a snapshot could not be fetched");
                None
            });
            let ended = found.map(|(state, members)| {
                let position = state.position;
                *staged.lock() = Some(state);
                (position, members)
            });
            owner.inbox.fetched(ended);
        };
        if std::thread::Builder::new().name("tidepool-fetch".into()).spawn(fetch).is_err() {
            shared.inbox.fetched(None);
        }
    }

    /// The state that was fetched last, if it is that one.
    pub(super) fn take(&self, position: Position) -> Option<Applied<S>> {
        self.staged.lock().take().filter(|state| state.position == position)
    }
}

fn fetch<S: StateMachine>(
    shared: &Shared<S>,
    calls: &Calls,
    source: MemberId,
) -> Result<Option<(Applied<S>, Members)>, GroupError> {
    let folder = shared.config.folder.join("image.new");
    let failed = |source| GroupError::Folder { path: folder.clone(), source };
    let began = Instant::now();
    let Some(answer) = calls.ask_blocking(source, vec![QUESTION, BEGIN], 10 * PART_TIMEOUT) else { return Ok(None) };
    let Some(Begun { offer, members, files }) = read_begun(&answer) else { return Ok(None) };
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(failed)?;
    }
    fs::create_dir_all(&folder).map_err(failed)?;
    let mut total = 0;
    for (file, (name, length)) in files.iter().enumerate() {
        let mut target = File::create(folder.join(name)).map_err(failed)?;
        let mut offset = 0;
        while offset < *length {
            if shared.failure().is_some() || shared.is_stopping() {
                return Ok(None);
            }
            let Some(bytes) = part(calls, source, [offer, file as u64, offset]) else { return Ok(None) };
            target.write_all(&bytes).map_err(failed)?;
            // Not the whole file at its end: a sync of the log would wait for all of it.
            target.sync_data().map_err(failed)?;
            offset += bytes.len() as u64;
        }
        target.sync_all().map_err(failed)?;
        total += length;
    }
    File::open(&folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
    let position = Image::adopt(&folder, &shared.config, &members)?;
    // By one thread: others may need the rest of this machine.
    let state: Applied<S> = Image::open(&folder, &shared.config)?.load(shared.config.epoch, NonZero::<usize>::MIN)?;
    tracing::info!(index = position.index, bytes = total, elapsed = ?began.elapsed(), "a snapshot is fetched");
    Ok(Some((state, members)))
}

/// One part, asked for until it is there and whole.
fn part(calls: &Calls, source: MemberId, [offer, file, offset]: [u64; 3]) -> Option<Vec<u8>> {
    let mut question = vec![QUESTION, PART];
    [offer, file, offset].iter().for_each(|number| question.extend_from_slice(&number.to_le_bytes()));
    (0..PART_ATTEMPTS).find_map(|_| {
        let mut answer = calls.ask_blocking(source, question.clone(), PART_TIMEOUT)?;
        let bytes = answer.split_off(4.min(answer.len()));
        let checksum = u32::from_le_bytes(answer.try_into().ok()?);
        (!bytes.is_empty() && crc32fast::hash(&bytes) == checksum).then_some(bytes)
    })
}

/// What is given.
struct Begun {
    offer: u64,
    members: Members,
    files: Vec<(String, u64)>,
}

fn read_begun(answer: &[u8]) -> Option<Begun> {
    fn number(rest: &mut &[u8]) -> Option<u64> {
        let (&value, behind) = rest.split_first_chunk()?;
        *rest = behind;
        Some(u64::from_le_bytes(value))
    }
    let mut rest = answer;
    let offer = number(&mut rest)?;
    let _position = (number(&mut rest)?, number(&mut rest)?);
    let length = usize::try_from(number(&mut rest)?).ok()?;
    let (members, mut rest) = rest.split_at_checked(length)?;
    let members = Members::decode(members)?;
    let mut files = Vec::new();
    while !rest.is_empty() && files.len() < FILES {
        let length = number(&mut rest)?;
        let (&name_length, behind) = rest.split_first()?;
        let (name, behind) = behind.split_at_checked(name_length.into())?;
        let name = std::str::from_utf8(name).ok()?;
        // A name, not a path: the other side must not choose where files go.
        let is_name = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        files.push((is_name.then(|| name.to_owned())?, length));
        rest = behind;
    }
    Some(Begun { offer, members, files })
}

/// Makes `image.new` the image. The old one is gone afterwards.
pub(super) fn put_in_place(folder: &Path) -> Result<(), GroupError> {
    let failed = |source| GroupError::Folder { path: folder.join("image"), source };
    let place = || {
        let old = folder.join("image.old");
        if old.exists() {
            fs::remove_dir_all(&old)?;
        }
        fs::rename(folder.join("image"), &old)?;
        fs::rename(folder.join("image.new"), folder.join("image"))?;
        File::open(folder)?.sync_all()?;
        fs::remove_dir_all(&old)
    };
    place().map_err(failed)
}

/// Tidies what a process left behind that died while it took or gave a snapshot.
pub(super) fn tidy(folder: &Path) -> Result<(), GroupError> {
    let failed = |source| GroupError::Folder { path: folder.to_owned(), source };
    let tidy = || {
        let (image, old) = (folder.join("image"), folder.join("image.old"));
        if !image.exists() && old.exists() {
            // The log still meets the old one.
            fs::rename(&old, &image)?;
        }
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("offer-") || name == "image.new" || name == "image.old" {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    };
    tidy().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(name: &str) -> Vec<u8> {
        let mut answer = [7u64, 30, 2].map(u64::to_le_bytes).concat();
        let members = Members::default().encode();
        answer.extend_from_slice(&(members.len() as u64).to_le_bytes());
        answer.extend_from_slice(&members);
        answer.extend_from_slice(&99u64.to_le_bytes());
        answer.push(u8::try_from(name.len()).expect("short"));
        answer.extend_from_slice(name.as_bytes());
        answer
    }

    #[test]
    fn the_giving_side_does_not_choose_where_files_go() {
        let begun = read_begun(&answer("000012.sst")).expect("a plain name");
        assert_eq!((begun.offer, begun.files), (7, vec![("000012.sst".to_owned(), 99)]));
        for name in ["../image", "/etc/passwd", "a/b", "", ".", "..", "a\0"] {
            assert!(read_begun(&answer(name)).is_none(), "{name:?}");
        }
        let whole = answer("CURRENT");
        assert!(
            (0..whole.len()).filter(|&length| read_begun(&whole[..length]).is_some()).count() <= 1,
            "cuts are refused"
        );
    }

    #[test]
    fn an_interrupted_exchange_leaves_one_image() {
        for (present, expected) in [
            (&["image", "image.new"][..], "image"),
            (&["image.old", "image.new"], "image.old"),
            (&["image", "image.old"], "image"),
        ] {
            let folder = tempfile::tempdir().expect("temporary folder");
            for name in present {
                fs::create_dir(folder.path().join(name)).expect("writable");
                fs::write(folder.path().join(name).join("which"), name).expect("writable");
            }
            tidy(folder.path()).expect("tidied");
            assert_eq!(fs::read_to_string(folder.path().join("image/which")).expect("an image"), expected);
            assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 1);
        }
    }
}
