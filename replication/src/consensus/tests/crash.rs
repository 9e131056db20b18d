//! Kills a process that proposes, at a random point: every answered proposal is there afterwards.
//!
//! The kill loses what the process had in memory, not what the kernel had: loss of power is not shown here.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

const FOLDER: &str = "TIDEPOOL_TEST_CRASH_FOLDER";

/// Runs as the child of the test below: proposes for ever, and prints each answer.
#[test]
#[ignore = "the other half of a_killed_process_keeps_what_it_answered"]
fn propose_until_killed() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let (_group, handle) = open(Path::new(&folder));
        let tasks: Vec<_> = (0..4)
            .map(|task| {
                tokio::spawn({
                    let handle = handle.clone();
                    async move {
                        for number in 0u64.. {
                            let name = format!("{task}-{}-{}", number % 50, "x".repeat(200));
                            let count = add(&handle, &name).await;
                            writeln!(std::io::stdout().lock(), "answer {name} {count}").unwrap();
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
}

#[tokio::test]
async fn a_killed_process_keeps_what_it_answered() {
    let folder = tempfile::tempdir().unwrap();
    let mut answered: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
    for round in 0..6u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "consensus::tests::crash::propose_until_killed"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        // Counted in answers, so that the kill falls into work, wherever that is.
        let wanted = 50 + 173 * round;
        let mut seen = 0;
        for line in output.lines() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            let &["answer", name, count] = words.as_slice() else { continue };
            let count: u64 = count.parse().unwrap();
            let before = answered.insert(name.into(), count).unwrap_or(0);
            assert!(count > before, "{name}: {count} after {before}");
            seen += 1;
            if seen == wanted {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(seen >= wanted, "the child ended by itself after {seen} answers");

        let (_group, handle) = open(folder.path());
        let found = counts(&handle).await;
        for (name, count) in &answered {
            let found = found.get(name).copied().unwrap_or(0);
            assert!(found >= *count, "{}: {found} of {count} after round {round}", String::from_utf8_lossy(name));
        }
    }
}
