//! `tidepool-stress`: runs benchmarks and prints each figure beside its limit, measured in the same run; runs failover drills.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tidepool_stress::bench::{self, BENCHES, BenchOptions};
use tidepool_stress::drill::{self, DrillOptions, SCENARIOS, Verdict};
use tidepool_stress::lookups::{self, LookupOptions};

/// The same as the node's, so that both sides of a benchmark pay the same for their buffers.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// A tmpfs: where the DRAM tiers of nodes under test lie.
const SEGMENTS: &str = "/dev/shm";

#[derive(Parser)]
#[command(name = "tidepool-stress", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run benchmarks; exit code 1 if a target is missed
    Bench {
        /// Which; none: all
        names: Vec<String>,
        /// Only say which there are
        #[arg(long)]
        list: bool,
        /// Fewer and shorter pairs: shows that it works, proves nothing
        #[arg(long)]
        quick: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Folder for files; default: a temporary one
        #[arg(long)]
        folder: Option<PathBuf>,
        /// The `tidepool` binary; default: beside this one
        #[arg(long)]
        tidepool: Option<PathBuf>,
        /// Folder with the recorded traces
        #[arg(long, default_value = "data")]
        data: PathBuf,
    },
    /// Run failover drills; exit code 1 if one fails
    Drill {
        /// Which; none: all
        names: Vec<String>,
        /// Only say which there are
        #[arg(long)]
        list: bool,
        /// How long each makes faults, in seconds, as 60s or 60
        #[arg(long, default_value = "60s", value_parser = seconds)]
        duration: Duration,
        /// Decides what clients ask and how long faults last
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// The `tidepool` binary; default: beside this one
        #[arg(long)]
        tidepool: Option<PathBuf>,
    },
    /// Read in a node's memory while it evicts and reuses it; exit code 1 if a byte is wrong
    Lookups {
        /// Objects to be found
        #[arg(long, default_value_t = 1_000_000_000)]
        lookups: u64,
        /// Threads that look
        #[arg(long, default_value_t = 2)]
        readers: u32,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// The `tidepool` binary; default: beside this one
        #[arg(long)]
        tidepool: Option<PathBuf>,
    },
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse();
    seconds.map(Duration::from_secs).map_err(|_| format!("{text:?} is no number of seconds: give 60s"))
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            // If standard error is gone, there is nobody to tell.
            let _unheard = writeln!(std::io::stderr(), "tidepool-stress: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: Arguments) -> Result<ExitCode, bench::Error> {
    let (names, list, quick, json, folder, tidepool, data) = match arguments.command {
        Command::Bench { names, list, quick, json, folder, tidepool, data } => {
            (names, list, quick, json, folder, tidepool, data)
        }
        Command::Drill { names, list: true, .. } => return list_drills(&names),
        Command::Drill { names, duration, seed, json, tidepool, .. } => {
            let tidepool = beside(tidepool)?;
            return run_drills(&names, &DrillOptions { duration, seed, tidepool }, json);
        }
        Command::Lookups { lookups, readers, json, tidepool } => {
            return run_lookups(&LookupOptions { tidepool: beside(tidepool)?, lookups, readers }, json);
        }
    };
    let mut out = std::io::stdout().lock();
    if list {
        for bench in BENCHES {
            writeln!(out, "{:<12} {}", bench.name, bench.about)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(unknown) = names.iter().find(|name| BENCHES.iter().all(|bench| bench.name != **name)) {
        return Err(format!("there is no bench {unknown:?}; --list shows which there are").into());
    }
    let scratch = tempfile::tempdir()?;
    let folder = folder.unwrap_or_else(|| scratch.path().to_owned());
    std::fs::create_dir_all(&folder)?;
    let tidepool = beside(tidepool)?;
    let mut figures = Vec::new();
    for bench in BENCHES.iter().filter(|bench| names.is_empty() || names.iter().any(|name| name == bench.name)) {
        if !json {
            writeln!(out, "{}: {}", bench.name, bench.about)?;
        }
        // Segments outlive their nodes; without a folder of their own they would fill memory from bench to bench.
        let segments = tempfile::tempdir_in(SEGMENTS)?;
        let options = BenchOptions {
            quick,
            folder: folder.clone(),
            segments: segments.path().to_owned(),
            tidepool: tidepool.clone(),
            data: data.clone(),
        };
        let found = (bench.run)(&options).unwrap_or_else(|error| vec![bench::Figure::failed(bench.name, &*error)]);
        if !json {
            for figure in &found {
                writeln!(out, "{figure}")?;
            }
            out.flush()?;
        }
        figures.extend(found);
    }
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&figures)?)?;
    }
    let missed = figures.iter().filter(|figure| figure.is_met() == Some(false)).count();
    if !json {
        writeln!(out, "{} figures, {missed} missed", figures.len())?;
    }
    Ok(if missed == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn beside(tidepool: Option<PathBuf>) -> std::io::Result<PathBuf> {
    match tidepool {
        Some(tidepool) => Ok(tidepool),
        None => Ok(std::env::current_exe()?.with_file_name("tidepool")),
    }
}

fn list_drills(names: &[String]) -> Result<ExitCode, bench::Error> {
    let mut out = std::io::stdout().lock();
    for scenario in
        SCENARIOS.iter().filter(|scenario| names.is_empty() || names.iter().any(|name| name == scenario.name))
    {
        writeln!(out, "{:<27} {}", scenario.name, scenario.about)?;
        if let Some(why) = scenario.why_never() {
            writeln!(out, "{:<27} not run: {why}", "")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn run_drills(names: &[String], options: &DrillOptions, json: bool) -> Result<ExitCode, bench::Error> {
    if let Some(unknown) = names.iter().find(|name| SCENARIOS.iter().all(|scenario| scenario.name != **name)) {
        return Err(format!("there is no drill {unknown:?}; --list shows which there are").into());
    }
    let chosen = SCENARIOS.iter().filter(|scenario| names.is_empty() || names.iter().any(|name| name == scenario.name));
    let mut reports = Vec::new();
    for scenario in chosen {
        if !json {
            writeln!(std::io::stderr(), "{}: {}", scenario.name, scenario.about)?;
        }
        reports.push(drill::run(scenario, options));
    }
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&reports)?)?;
    } else {
        write!(out, "{}", drill::table(&reports))?;
    }
    let failed = reports.iter().any(|report| report.verdict == Verdict::Failed);
    Ok(if failed { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

fn run_lookups(options: &LookupOptions, json: bool) -> Result<ExitCode, bench::Error> {
    let report = lookups::run(options)?;
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        let lookups::LookupReport { found, not_found, put, evicted, seconds, wrong } = &report;
        writeln!(
            out,
            "{found} objects found and {not_found} not, while {put} were put and {evicted} evicted: {seconds:.0} s"
        )?;
        writeln!(out, "wrong: {}", wrong.len())?;
        wrong.iter().try_for_each(|wrong| writeln!(out, "  {wrong}"))?;
    }
    Ok(if report.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
