//! Folders that must be refused: damaged, foreign, or of parts that do not meet.

use super::*;
use std::fs;

/// A folder with entries that are in the log only.
async fn unflushed(folder: &Path, names: usize) {
    let limits = GroupLimits { image_interval: Duration::from_secs(10), ..eager() };
    let (group, handle) = open_limited(folder, limits);
    for name in 0..names {
        add(&handle, &format!("name-{name}")).await;
    }
    handle.crash();
    handle.shutdown().await;
    drop(group);
}

fn error(folder: &Path) -> GroupError {
    Group::open::<Counter>(config(folder), eager()).err().expect("refused")
}

/// The newest write-ahead log of the log's database.
fn write_ahead_log(folder: &Path) -> std::path::PathBuf {
    let files = fs::read_dir(folder.join("log")).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|kind| kind == "log")).max().unwrap()
}

#[tokio::test]
async fn entries_are_replayed_without_an_image() {
    let folder = tempfile::tempdir().unwrap();
    unflushed(folder.path(), 20).await;
    let (_group, handle) = open(folder.path());
    assert_eq!(counts(&handle).await.len(), 20);
}

#[tokio::test]
async fn a_damaged_record_is_refused() {
    for fraction in [3, 5, 9] {
        let folder = tempfile::tempdir().unwrap();
        unflushed(folder.path(), 20).await;
        let path = write_ahead_log(folder.path());
        let mut bytes = fs::read(&path).unwrap();
        let position = bytes.len() * fraction / 10;
        bytes[position] ^= 0x10;
        fs::write(&path, bytes).unwrap();
        let error = error(folder.path());
        assert!(matches!(error, GroupError::Open { what: "the log", .. }), "{error}");
        assert!(error.to_string().contains("orruption"), "{error}");
    }
}

/// With `os`, a boot between two starts leaves holes where pages never got to the disk.
#[tokio::test]
async fn a_hole_is_the_end_after_a_boot_under_os_and_only_then() {
    for (boot, opens) in [("o another boot", true), ("f another boot", false)] {
        let folder = tempfile::tempdir().unwrap();
        unflushed(folder.path(), 20).await;
        let path = write_ahead_log(folder.path());
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 64].fill(0);
        fs::write(&path, bytes).unwrap();
        fs::write(folder.path().join("boot"), boot).unwrap();
        if !opens {
            assert!(matches!(error(folder.path()), GroupError::Open { .. }));
            continue;
        }
        let (group, handle) = open(folder.path());
        let found = counts(&handle).await;
        assert!((1..20).contains(&found.len()), "{} of 20", found.len());
        let expected: Vec<_> = (0..found.len()).map(|name| format!("name-{name}").into_bytes()).collect();
        assert!(expected.iter().all(|name| found.contains_key(name)), "the first ones, without a gap");
        add(&handle, "after").await;
        handle.shutdown().await;
        drop((group, handle));
        let (_group, handle) = open(folder.path());
        assert_eq!(counts(&handle).await.len(), found.len() + 1);
    }
}

#[tokio::test]
async fn a_cut_last_record_is_as_if_never_written() {
    let folder = tempfile::tempdir().unwrap();
    unflushed(folder.path(), 20).await;
    let path = write_ahead_log(folder.path());
    let length = fs::metadata(&path).unwrap().len();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 3).unwrap();
    let (_group, handle) = open(folder.path());
    assert_eq!(counts(&handle).await.len(), 19);
}

#[tokio::test]
async fn a_lost_log_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (group, handle) = open(folder.path());
    add(&handle, "a").await;
    handle.shutdown().await;
    drop((group, handle));
    fs::remove_dir_all(folder.path().join("log")).unwrap();
    let error = error(folder.path());
    assert!(matches!(error, GroupError::Gap { image: LogIndex(2), log_last: LogIndex(0), .. }), "{error}");
}

#[tokio::test]
async fn a_lost_image_is_refused_if_the_log_was_compacted() {
    let folder = tempfile::tempdir().unwrap();
    let (group, handle) = open(folder.path());
    while handle.status().log_first == LogIndex(1) {
        add(&handle, &"n".repeat(1000)).await;
    }
    handle.shutdown().await;
    drop((group, handle));
    fs::remove_dir_all(folder.path().join("image")).unwrap();
    let error = error(folder.path());
    assert!(matches!(error, GroupError::Gap { image: LogIndex(0), .. }), "{error}");
}

#[tokio::test]
async fn another_cluster_or_node_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    unflushed(folder.path(), 1).await;
    let config = config(folder.path());
    let foreign = [GroupConfig { cluster: ClusterId(8), ..config.clone() }, GroupConfig { node: NodeId(4), ..config }];
    for config in foreign {
        let error = Group::open::<Counter>(config, eager()).err().expect("refused");
        assert!(
            matches!(error, GroupError::Foreign { found_cluster: ClusterId(7), found_node: NodeId(3), .. }),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_later_epoch_goes_on_above_all_indices_of_earlier_ones() {
    let mut last = LogIndex(0);
    for epoch in 0..3 {
        let folder = tempfile::tempdir().unwrap();
        let config = GroupConfig { epoch: ClusterEpoch(epoch), ..config(folder.path()) };
        for life in 1..=3 {
            let (group, handle) = Group::open::<Counter>(config.clone(), eager()).unwrap();
            assert_eq!(add(&handle, "a").await, life, "epoch {epoch}");
            assert!(handle.applied() > last);
            last = handle.applied();
            handle.shutdown().await;
            drop(group);
        }
    }
}

#[tokio::test]
async fn a_log_of_an_earlier_epoch_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    unflushed(folder.path(), 1).await;
    let config = GroupConfig { epoch: ClusterEpoch(1), ..config(folder.path()) };
    let error = Group::open::<Counter>(config, eager()).err().expect("refused");
    assert!(matches!(error, GroupError::Epoch { found: ClusterEpoch(0), epoch: ClusterEpoch(1), .. }), "{error}");
}

#[tokio::test]
async fn an_image_of_another_cluster_is_refused() {
    let [one, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    unflushed(one.path(), 1).await;
    let config = GroupConfig { cluster: ClusterId(8), ..config(other.path()) };
    let (group, handle) = Group::open::<Counter>(config, eager()).unwrap();
    handle.shutdown().await;
    drop((group, handle));
    fs::remove_dir_all(one.path().join("image")).unwrap();
    fs::rename(other.path().join("image"), one.path().join("image")).unwrap();
    assert!(matches!(error(one.path()), GroupError::Foreign { what: "the image", .. }));
}
