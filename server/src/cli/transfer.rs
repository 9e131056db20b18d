//! Commands that move objects: put and get.

use std::io::{IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use clap::{Args, ValueEnum};
use futures::Stream;
use serde_json::json;
use tidepool_client::{DataType, Durability, GetOptions, ObjectStream, PutDone, PutOptions, PutOutcome, Stripes};
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use super::connection::ConnectionArguments;
use super::failure::Failure;
use super::key::KeyArgument;
use super::objects::data_type_named;
use super::output::{Output, size};

/// Bytes read from a file at a time.
const READ_BYTES: usize = 1 << 20;
/// A put announces its length first; standard input has none, so that it is held in memory, up to this.
const STANDARD_INPUT_BYTES: u64 = 1 << 30;
const BAR: &str = "{bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DurabilityArgument {
    Memory,
    Nvme,
}

#[derive(Debug, Args)]
pub(super) struct PutArguments {
    /// Key: text, or hex:..
    key: KeyArgument,
    /// File to store; -: standard input
    file: PathBuf,
    /// Replace an existing object
    #[arg(long)]
    upsert: bool,
    /// Pin it from the start
    #[arg(long)]
    pin: bool,
    /// Evict it after others, for so many seconds
    #[arg(long)]
    soft_pin_seconds: Option<u64>,
    /// Group that it belongs to: kept and shown
    #[arg(long, default_value = "", hide_default_value = true)]
    group: String,
    /// What it holds: kv_cache, tensor, weight, ..
    #[arg(long = "type", value_parser = data_type_named, default_value = "unknown")]
    data_type: DataType,
    /// What the acknowledged object survives: the process, or loss of power too
    #[arg(long, value_enum, default_value = "memory")]
    durability: DurabilityArgument,
    /// How many copies, on as many nodes; 0: as the node's setting says
    #[arg(long, default_value = "0", hide_default_value = true)]
    replicas: u32,
    /// With how many of them the put is acknowledged; 0: one
    #[arg(long, default_value = "0", hide_default_value = true)]
    min_replicas: u32,
    /// Nodes that are to have the further copies: number, gRPC address, host of it, or host label; may be given several times
    #[arg(long)]
    prefer: Vec<String>,
    /// Lay it over so many nodes in parts, for `get --striped`; 0: over all. It is held in memory meanwhile
    #[arg(long, value_name = "NODES", conflicts_with = "group")]
    stripes: Option<usize>,
}

#[derive(Debug, Args)]
pub(super) struct GetArguments {
    /// Key: text, or hex:..
    key: KeyArgument,
    /// File to write, complete or not at all; without it, standard output
    #[arg(long, short)]
    output: Option<PathBuf>,
    /// First byte to read
    #[arg(long, default_value_t = 0)]
    offset: u64,
    /// Bytes to read from there
    #[arg(long)]
    length: Option<u64>,
    /// Ask the leader
    #[arg(long)]
    fresh: bool,
    /// Exactly this version, without asking the catalog
    #[arg(long, default_value = "", hide_default_value = true)]
    object_version: String,
    /// An object that was put with --stripes: its parts are read side by side, and held in memory
    #[arg(long, conflicts_with_all = ["fresh", "object_version"])]
    striped: bool,
}

fn file_failure(action: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::local("FILE", format!("{action} {}: {error}", path.display()))
}

pub(super) async fn put(
    arguments: &PutArguments,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let client = connection.client(1)?;
    let options = PutOptions {
        durability: match arguments.durability {
            DurabilityArgument::Memory => Durability::Memory,
            DurabilityArgument::Nvme => Durability::Nvme,
        },
        data_type: arguments.data_type,
        group: arguments.group.clone(),
        upsert: arguments.upsert,
        pin: arguments.pin,
        soft_pin: arguments.soft_pin_seconds.map(Duration::from_secs),
        replicas: arguments.replicas,
        min_replicas: arguments.min_replicas,
        prefer: arguments.prefer.clone(),
    };
    let (KeyArgument(key), path) = (&arguments.key, &arguments.file);
    let is_piped = path.as_os_str() == "-";
    let (length, done) = if let Some(nodes) = arguments.stripes {
        let read = async || tokio::fs::read(path).await.map_err(|error| file_failure("read", path, &error));
        let value = if is_piped { read_standard_input().await? } else { read().await?.into() };
        let stripes = Stripes { nodes, ..Stripes::default() };
        (value.len() as u64, client.put_striped(key, value, &options, stripes).await?)
    } else if is_piped {
        let value = read_standard_input().await?;
        (value.len() as u64, client.put(key, value, &options).await?)
    } else {
        let file = File::open(path).await.map_err(|error| file_failure("open", path, &error))?;
        let metadata = file.metadata().await.map_err(|error| file_failure("look at", path, &error))?;
        if !metadata.is_file() {
            return Err(Failure::usage(format!("{} is not a file; pipe it into `put KEY -`", path.display())));
        }
        let bar = output.progress(metadata.len(), BAR);
        let counted = bar.clone();
        let source = read_pieces(file, move |bytes| counted.inc(bytes));
        let done = client.put_stream(key, metadata.len(), source, &options).await?;
        bar.finish_and_clear();
        (metadata.len(), done)
    };
    let PutDone { outcome, log_index } = done;
    let word = match outcome {
        PutOutcome::Stored => "stored",
        PutOutcome::AlreadyExists => "already_exists",
    };
    output.answer(&json!({ "outcome": word, "length": length, "log_index": log_index }), |_| match outcome {
        PutOutcome::Stored => format!("stored {key} ({})\n", size(length)),
        PutOutcome::AlreadyExists => format!("{key} exists already; nothing was written (--upsert replaces)\n"),
    })
}

async fn read_standard_input() -> Result<Bytes, Failure> {
    let read = || {
        let mut value = Vec::new();
        std::io::stdin().lock().take(STANDARD_INPUT_BYTES + 1).read_to_end(&mut value).map(|_| value)
    };
    let value = tokio::task::spawn_blocking(read).await.map_err(std::io::Error::other).flatten();
    let value = value.map_err(|error| file_failure("read", Path::new("standard input"), &error))?;
    if value.len() as u64 > STANDARD_INPUT_BYTES {
        let most = size(STANDARD_INPUT_BYTES);
        return Err(Failure::usage(format!("standard input has more than {most}: write it to a file, and put that")));
    }
    Ok(value.into())
}

/// The bytes of `reader` in pieces; `count` hears of each.
fn read_pieces(
    reader: impl AsyncRead + Unpin + Send + 'static,
    count: impl Fn(u64) + Send + 'static,
) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    futures::stream::try_unfold((reader, count), |(mut reader, count)| async move {
        let mut piece = BytesMut::with_capacity(READ_BYTES);
        while piece.len() < READ_BYTES && reader.read_buf(&mut piece).await? > 0 {}
        count(piece.len() as u64);
        Ok((!piece.is_empty()).then(|| (piece.freeze(), (reader, count))))
    })
}

pub(super) async fn get(
    arguments: &GetArguments,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let KeyArgument(key) = &arguments.key;
    let options = GetOptions {
        offset: arguments.offset,
        length: arguments.length,
        fresh: arguments.fresh,
        version: arguments.object_version.clone(),
        ..GetOptions::default()
    };
    let client = connection.client(1)?;
    let missing = || Failure::missing(key);
    let mut source = if arguments.striped {
        let value = client.get_striped_range(key, arguments.offset, arguments.length).await?.ok_or_else(missing)?;
        Source::Value(Some(value))
    } else {
        Source::Stream(Box::new(client.get_stream(key, options).await?.ok_or_else(missing)?))
    };
    let Some(path) = &arguments.output else { return to_standard_output(&mut source, output).await };
    let length = source.length();
    let bar = output.progress(length, BAR);
    // Under another name until every byte is verified.
    let mut part = path.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let written = to_file(&mut source, &part, |bytes| bar.inc(bytes)).await;
    bar.finish_and_clear();
    let renamed = match written {
        Ok(()) => tokio::fs::rename(&part, path).await.map_err(|error| file_failure("rename to", path, &error)),
        Err(failure) => Err(failure),
    };
    if let Err(failure) = renamed {
        // The first failure is the one to tell.
        let _left_behind = tokio::fs::remove_file(&part).await;
        return Err(failure);
    }
    output.answer(&json!({ "length": length, "version": source.version() }), |_| {
        format!("wrote {} ({})\n", path.display(), size(length))
    })
}

/// Where the bytes of a get come from.
enum Source {
    Stream(Box<ObjectStream>),
    /// All of them, until they are taken.
    Value(Option<Bytes>),
}

impl Source {
    fn length(&self) -> u64 {
        match self {
            Self::Stream(stream) => stream.length(),
            Self::Value(value) => value.as_ref().map_or(0, |value| value.len() as u64),
        }
    }

    /// A striped object has one for each part.
    fn version(&self) -> Option<&str> {
        match self {
            Self::Stream(stream) => Some(&stream.info.version),
            Self::Value(_) => None,
        }
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match self {
            Self::Stream(stream) => Ok(stream.next().await?),
            Self::Value(value) => Ok(value.take()),
        }
    }
}

async fn to_file(source: &mut Source, path: &Path, count: impl Fn(u64)) -> Result<(), Failure> {
    let mut file = File::create(path).await.map_err(|error| file_failure("create", path, &error))?;
    while let Some(piece) = source.next().await? {
        file.write_all(&piece).await.map_err(|error| file_failure("write", path, &error))?;
        count(piece.len() as u64);
    }
    file.sync_all().await.map_err(|error| file_failure("sync", path, &error))
}

/// Pieces go out as they come; if the checksum is wrong at the end, the exit code says so.
async fn to_standard_output(source: &mut Source, output: &Output) -> Result<ExitCode, Failure> {
    if std::io::stdout().is_terminal() && source.length() > 1 << 20 {
        return Err(Failure::usage("more than 1 MiB for a terminal: use --output, or a pipe"));
    }
    while let Some(piece) = source.next().await? {
        output.bytes(&piece)?;
    }
    Ok(ExitCode::SUCCESS)
}
