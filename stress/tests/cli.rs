//! The command line against a running node: what each command prints, for people and for programs, and how it ends.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::BufRead as _;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;
use tidepool_stress::node_process::{NodeOptions, NodeProcess, Place, program_beside};

/// Ended, and the answer is no.
const NO: i32 = 1;

/// The program, and where it finds the node.
struct Cli {
    program: PathBuf,
    arguments: Vec<String>,
}

impl Cli {
    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(&self.program).args(&self.arguments).args(arguments).output().unwrap()
    }

    /// What it prints for people, if it succeeds.
    fn says(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// What it prints for programs, on standard error if it failed, and its exit code.
    fn answers(&self, arguments: &[&str]) -> (Value, Option<i32>) {
        let output = self.run(&[&["--json"], arguments].concat());
        let words = if output.stdout.is_empty() { &output.stderr } else { &output.stdout };
        let answer = serde_json::from_slice(words);
        (answer.unwrap_or_else(|error| panic!("{arguments:?}: {error}: {output:?}")), output.status.code())
    }
}

/// A node of its own, and where it keeps everything.
struct Started {
    program: PathBuf,
    folder: TempDir,
    _segment: TempDir,
    node: NodeProcess,
}

fn started(dram_bytes: u64) -> Started {
    let (folder, segment) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let program = program_beside(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    let settings = vec![
        format!("dram.folder='{}'", segment.path().display()),
        "nvme.region_bytes=1MiB".into(),
        "store.slice_bytes=256KiB".into(),
    ];
    let options = NodeOptions {
        program: program.clone(),
        data: folder.path().join("data"),
        dram_bytes,
        nvme_bytes: 64 << 20,
        settings,
        place: Place::default(),
    };
    Started { program, folder, _segment: segment, node: NodeProcess::start(options).unwrap() }
}

#[test]
fn every_command_answers_people_and_programs_and_ends_with_what_it_found() {
    let Started { program, folder, _segment, mut node } = started(32 << 20);
    let arguments = vec![format!("--endpoint={}", node.grpc), format!("--admin={}", node.admin)];
    let cli = Cli { program, arguments };

    let value: Vec<u8> = (0..300_000_u32).map(|index| (index % 251) as u8).collect();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    std::fs::write(&source, &value).unwrap();
    let (source, output) = (source.to_str().unwrap(), format!("--output={}", target.display()));
    assert!(cli.says(&["put", "a", source]).starts_with("stored a"));
    let (answer, code) = cli.answers(&["put", "a", source]);
    assert_eq!((&answer["outcome"], code), (&json!("already_exists"), Some(0)));
    cli.says(&["put", "hex:ff00", source]);
    cli.says(&["get", "a", &output]);
    assert!(std::fs::read(&target).unwrap() == value);
    let part = cli.run(&["get", "a", "--offset=250", "--length=3"]);
    assert_eq!(part.stdout, [250, 0, 1]);
    let (answer, code) = cli.answers(&["get", "absent"]);
    assert_eq!((&answer["reason"], code), (&json!("NOT_FOUND"), Some(NO)));
    assert!(cli.run(&["get", "absent", &output]).stdout.is_empty());
    assert!(std::fs::read(&target).unwrap() == value, "a file is written whole or not at all");

    let (answer, code) = cli.answers(&["exists", "a", "absent"]);
    assert_eq!(answer, json!([{ "key": "a", "existence": "present" }, { "key": "absent", "existence": "missing" }]));
    assert_eq!(code, Some(NO));
    assert_eq!(cli.answers(&["exists", "a"]).1, Some(0));
    assert_eq!(cli.answers(&["ls", "--type", "gradient"]).0, json!([]));
    let (listed, _) = cli.answers(&["ls"]);
    assert_eq!((&listed[0]["key"], &listed[1]["key_base64"]), (&json!("a"), &json!("/wA=")));
    assert!(cli.says(&["ls"]).contains("hex:ff00"));
    assert_eq!(cli.answers(&["stat", "a"]).0["length"], json!(300_000));
    assert!(cli.says(&["stat", "a"]).contains("300000 bytes"));

    let (object, _) = cli.answers(&["admin", "object", "a"]);
    assert_eq!(object["slices"].as_array().unwrap().len(), 2);
    assert!(cli.says(&["admin", "object", "a"]).contains("dram"));
    let (tiers, _) = cli.answers(&["admin", "tiers"]);
    assert_eq!((&tiers["tiers"][0]["tier"], &tiers["tiers"][0]["objects"]), (&json!("dram"), &json!(2)));
    assert!(cli.says(&["admin", "tiers"]).contains("write amplification"));
    assert_eq!(cli.answers(&["admin", "recovery"]).0["finished"], json!(true));
    assert!(cli.says(&["admin", "recovery"]).contains("hot_keys"));
    assert_eq!(cli.answers(&["admin", "nvme", "detach"]).0["state"], json!("detached"));
    assert_eq!(cli.answers(&["admin", "nvme", "attach", "--capacity=96MiB"]).0["state"], json!("attached"));
    assert_eq!(cli.answers(&["admin", "raft", "status"]).0["role"], json!("leader"));

    cli.says(&["put", "striped", source, "--stripes=0"]);
    cli.says(&["get", "striped", "--striped", &output]);
    assert!(std::fs::read(&target).unwrap() == value);
    assert_eq!(cli.run(&["get", "striped", "--striped", "--offset=250", "--length=3"]).stdout, [250, 0, 1]);
    assert_eq!(cli.answers(&["get", "a", "--striped"]).0["reason"], json!("NOT_STRIPED"));
    assert!(cli.says(&["rm", "--striped", "striped"]).contains("removed"));
    assert_eq!(cli.answers(&["ls", "stripes/"]).0, json!([]));

    let (removed, code) = cli.answers(&["rm", "a", "absent"]);
    let outcomes = json!([{ "key": "a", "outcome": "removed" }, { "key": "absent", "outcome": "missing" }]);
    assert_eq!((removed, code), (outcomes, Some(NO)));
    cli.says(&["rm", "--all"]);
    assert_eq!(cli.answers(&["ls"]).0, json!([]));
    node.stop().unwrap();

    // Nobody is there: what failed, and what to do.
    let (answer, code) = cli.answers(&["exists", "a"]);
    assert!(answer["error"].as_str().unwrap().contains("tidepool serve"), "{answer}");
    assert!(code > Some(NO), "{code:?}: no is an answer, this is none");
}

/// A node whose engine wants certificates gets them from the command line, which else goes by gRPC.
#[test]
fn the_command_line_brings_certificates() {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    let (folder, segment) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let program = program_beside(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["store.test".into()]).unwrap().signed_by(&key, &authority).unwrap();
    let files = [("certificate", certificate.pem()), ("key", key.serialize_pem()), ("authorities", authority.pem())];
    let files = files.map(|(what, text)| {
        let path = folder.path().join(what);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        (what, path.display().to_string())
    });
    let mut settings: Vec<_> = files.iter().map(|(what, path)| format!("engine.tls_{what}='{path}'")).collect();
    settings.push(format!("dram.folder='{}'", segment.path().display()));
    let options = NodeOptions {
        program: program.clone(),
        data: folder.path().join("data"),
        dram_bytes: 32 << 20,
        nvme_bytes: 0,
        settings,
        place: Place::default(),
    };
    let node = NodeProcess::start(options).unwrap();
    let bench = "--json bench store --ways=tcp --operations=get --block=4KiB --seconds=0.05 --total=64KiB --verify";
    let engine_calls = |arguments: Vec<String>| {
        let arguments = [vec![format!("--endpoint={}", node.grpc)], arguments].concat();
        let output = Cli { program: program.clone(), arguments }.run(&bench.split(' ').collect::<Vec<_>>());
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["engine_calls"].as_u64().unwrap()
    };
    let mut given: Vec<_> = files.iter().map(|(what, path)| format!("--tls-{what}={path}")).collect();
    given.push("--tls-name=store.test".into());
    assert!(engine_calls(given.clone()) > 0);
    assert_eq!(engine_calls(Vec::new()), 0);
    let cli = Cli { program: program.clone(), arguments: given[..2].to_vec() };
    let (answer, code) = cli.answers(&["exists", "a"]);
    assert!(answer["error"].as_str().unwrap().contains("--tls-authorities") && code == Some(2), "{answer}");
}

/// What needs no node.
#[test]
fn settings_machine_and_completions_are_looked_at_without_a_node() {
    let program = program_beside(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
    let cli = Cli { program, arguments: Vec::new() };
    let folder = tempfile::tempdir().unwrap();
    let data = format!("--data={}", folder.path().join("data").display());
    let (findings, _) = cli.answers(&["doctor", "--quick", &data]);
    let looked_at: Vec<&str> =
        findings.as_array().unwrap().iter().map(|finding| finding["what"].as_str().unwrap()).collect();
    for what in ["memory", "io_uring", "O_DIRECT", "open files", "locked memory", "grpc.listen", "segments"] {
        assert!(looked_at.contains(&what), "{what} is not in {looked_at:?}");
    }
    assert!(cli.says(&["config", "print"]).contains("[nvme]"));
    cli.says(&["config", "check"]);
    let wrong = cli.run(&["config", "check", "--set", "dram.watermark_high=2"]);
    let words = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(!wrong.status.success() && words.contains("dram.watermark_high = 2"), "{words}");
    for shell in ["bash", "zsh", "fish"] {
        assert!(cli.says(&["completions", shell]).contains("tidepool"));
    }
}

/// The short form of the store's bench: every way and every call, all bytes compared, and nothing left behind.
#[test]
fn the_bench_of_the_store_measures_every_call_by_every_way() {
    let Started { program, folder: _folder, _segment, node } = started(64 << 20);
    let cli = Cli { program, arguments: vec![format!("--endpoint={}", node.grpc)] };
    let short =
        ["bench", "store", "--block=4KiB,300KiB", "--batch=8", "--threads=2", "--seconds=0.05", "--total=512KiB"];
    let all_ways = [&["--json"][..], &short, &["--ways=local,tcp,grpc", "--verify"]].concat();
    let output = cli.run(&all_ways);
    assert!(output.status.success(), "{output:?}");
    let lines: Vec<Value> = output.stdout.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert_eq!(lines.len(), 2 * 3 * 6);
    for line in &lines {
        let number = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("{name}: {line}"));
        let (way, operation) = (line["way"].as_str().unwrap(), line["operation"].as_str().unwrap());
        assert!(number("calls") > 0 && number("items") == number("calls") * number("batch"), "{line}");
        assert_eq!([number("wrong"), number("errors")], [0, 0], "{line}");
        assert_eq!(number("bytes") > 0, !operation.starts_with("exists"), "{line}");
        assert!(line["p50_us"].as_f64().unwrap() > 0.0, "{line}");
        assert_eq!(number("without_call") > 0, way == "local" && operation.starts_with("get"), "{line}");
        assert_eq!(number("engine_calls") > 0, way != "grpc" && number("without_call") == 0, "{line}");
    }
    assert_eq!(cli.answers(&["ls"]).0, json!([]), "its objects are removed");
    let table = cli.says(&[&short[..], &["--operations=get", "--ways=tcp"]].concat());
    assert!(table.contains("objects/s") && table.contains("wrong objects: 0"), "{table}");
}
