//! The command line: one subcommand a file.
//!
//! Human tables by default, `--json` everywhere; answers on standard output, progress and errors on standard error.
//! Exit codes: 0 done; 1 the answer is no (no such object, wrong bytes, a check that failed); 2 wrong usage or
//! settings; 3 the server can't be reached or refused.

mod admin;
mod admin_http;
mod bench;
mod cluster;
mod config;
mod connection;
mod doctor;
mod failure;
mod key;
mod objects;
mod output;
mod raft;
mod replay;
mod serve;
mod tasks;
mod tenants;
mod transfer;
mod types;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use connection::ConnectionArguments;
use failure::Failure;
use output::Output;

/// A layered object store for the KV cache of LLM inference.
#[derive(Debug, Parser)]
#[command(name = "tidepool", version, propagate_version = true, max_term_width = 110)]
struct Arguments {
    #[command(flatten)]
    connection: ConnectionArguments,
    /// Print JSON instead of tables
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a node
    Serve(serve::ServeArguments),
    /// Store an object
    Put(transfer::PutArguments),
    /// Read an object, or a range of it
    Get(transfer::GetArguments),
    /// Say whether objects exist; exit code 1 if one does not
    Exists(objects::ExistsArguments),
    /// Remove objects, by key or by pattern
    Rm(objects::RemoveArguments),
    /// List objects in key order
    Ls(objects::ListArguments),
    /// Show what the catalog knows of an object
    Stat(objects::StatArguments),
    /// Show or change what a node has and does
    #[command(subcommand)]
    Admin(admin::AdminCommand),
    /// Run several nodes on this machine
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Replay a recorded trace and check every byte of every hit
    Replay(replay::ReplayArguments),
    /// Measure what this machine reaches against a node
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Look at this machine: what is there, and what follows from it
    Doctor(doctor::DoctorArguments),
    /// Check or print settings
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// Runs the command line of this process and says how it ended.
#[must_use]
pub fn run() -> ExitCode {
    // A mistake in the arguments is explained by clap, with exit code 2.
    let arguments = Arguments::parse();
    let output = Output::new(arguments.json);
    match dispatch(arguments, &output) {
        Ok(code) => code,
        Err(failure) => failure.report(&output),
    }
}

fn dispatch(arguments: Arguments, output: &Output) -> Result<ExitCode, Failure> {
    let Arguments { connection, command, .. } = arguments;
    match command {
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "tidepool", &mut script);
            output.bytes(&script)
        }
        Command::Config(command) => config::run(&command, output),
        Command::Doctor(arguments) => doctor::run(&arguments, output),
        Command::Serve(arguments) => runtime()?.block_on(serve::run(&arguments, output)),
        Command::Put(arguments) => runtime()?.block_on(transfer::put(&arguments, &connection, output)),
        Command::Get(arguments) => runtime()?.block_on(transfer::get(&arguments, &connection, output)),
        Command::Exists(arguments) => runtime()?.block_on(objects::exists(&arguments, &connection, output)),
        Command::Rm(arguments) => runtime()?.block_on(objects::remove(&arguments, &connection, output)),
        Command::Ls(arguments) => runtime()?.block_on(objects::list(&arguments, &connection, output)),
        Command::Stat(arguments) => runtime()?.block_on(objects::stat(&arguments, &connection, output)),
        Command::Admin(command) => runtime()?.block_on(admin::run(&command, &connection, output)),
        Command::Cluster(command) => runtime()?.block_on(cluster::run(&command, output)),
        Command::Bench(command) => bench::run(&command, &connection, &runtime()?, output),
        Command::Replay(arguments) => runtime()?.block_on(replay::run(&arguments, &connection, output)),
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::local("RUNTIME", format!("start the runtime: {error}")))
}

#[cfg(test)]
mod tests;
