//! The process whose memory, or file, is read and written.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use tidepool_transfer::{AccessRights, Engine, Handler, Memory, PeerMapping, Responder, Settings};

use crate::Error;
use crate::arguments::Arguments;

/// Name of the segment that a target registers.
pub(crate) const SEGMENT: &str = "bench";
/// Bytes of it unless told otherwise: far more than any cache.
pub(crate) const SEGMENT_BYTES: u64 = 256 << 20;

struct Echo;

impl Handler for Echo {
    fn handle(&self, request: &[u8], responder: Responder) {
        responder.reply(request);
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let listen = arguments.text("listen").unwrap_or("127.0.0.1:0").split(',').map(str::to_owned).collect();
    let bytes = arguments.number("bytes", SEGMENT_BYTES)?;
    let engine = Engine::start(Settings { listen, ..arguments.settings()? })?;
    if let Some(path) = arguments.text("file") {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        fill(bytes, |offset, block| Ok(file.write_all_at(block, offset)?))?;
        engine.register_file(file, AccessRights::READ_WRITE, Some(SEGMENT))?;
    } else {
        let memory = Memory::shared(usize::try_from(bytes)?, PeerMapping::Writable)?;
        fill(bytes, |offset, block| Ok(memory.write_at(offset, block)?))?;
        engine.register(&memory, AccessRights::READ_WRITE, Some(SEGMENT))?;
    }
    engine.set_handler(Arc::new(Echo));
    say(&format!("{{\"address\":\"{}\",\"bytes\":{bytes}}}", engine.addresses()[0]))?;
    // Whoever started this holds the other end.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// Prints a line at once.
pub(crate) fn say(line: &str) -> Result<(), Error> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}

/// Byte at `offset` of a target's memory as it was filled: its 4 KiB block tells itself from others.
pub(crate) fn block_bytes(block: u64) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    for (index, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = ((block << 9) + index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    }
    bytes
}

fn fill(bytes: u64, mut write: impl FnMut(u64, &[u8]) -> Result<(), Error>) -> Result<(), Error> {
    (0..bytes / 4096).try_for_each(|block| write(block * 4096, &block_bytes(block)))
}

/// A child of this program that said its address; ends with this value.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: String,
}

impl Process {
    pub(crate) fn start(arguments: &[&str]) -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut said = String::new();
        let mut out = child.stdout.take().ok_or("no standard output")?;
        let mut byte = [0];
        while out.read(&mut byte)? == 1 && byte[0] != b'\n' {
            said.push(char::from(byte[0]));
        }
        let address = said.split('"').nth(3).ok_or_else(|| format!("{said:?} has no address"))?.to_owned();
        Ok(Self { child, address })
    }
}

impl Process {
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
