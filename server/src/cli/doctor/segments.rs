//! DRAM segments that nobody will come back for: a node keeps its segment for its next life, and a data folder that was
//! deleted has none.

use std::path::{Path, PathBuf};

use tidepool_tiers::memory::{FoundSegment, segment_folders, segments_in};

use super::super::output::size;
use super::Finding;
use super::Verdict::{Good, Note};
use crate::config::Config;
use crate::folder::DataFolder;
use crate::plan;

const WHAT: &str = "segments";
/// More are counted, not named.
const MOST_NAMED: usize = 16;

/// What becomes of a segment.
enum Fate {
    /// A process has it open.
    InUse,
    /// Its node does not run, and can: the data folder is there.
    Waits,
    /// Its data folder is gone, or another node's now.
    LeftBehind(PathBuf),
    /// It names no data folder, and is of none that is known here.
    Unknown,
}

pub(super) fn look(config: &Config) -> Vec<Finding> {
    let data = config.data.clone().unwrap_or_else(plan::default_data_folder);
    let folders = config.dram.folder.clone().map_or_else(segment_folders, |folder| vec![folder]);
    let mut found = Vec::new();
    for folder in folders {
        match segments_in(&folder) {
            Ok(segments) => found.extend(segments),
            // Where there is no such folder, another finding says so if it matters.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                let looked = format!("{} can't be read: {error}", folder.display());
                return vec![Finding::new(Note, WHAT, looked, "what nodes left behind there is not known")];
            }
        }
    }
    judge(found, &data)
}

fn judge(found: Vec<FoundSegment>, data: &Path) -> Vec<Finding> {
    let judged: Vec<(FoundSegment, Fate)> = found
        .into_iter()
        .map(|segment| {
            let fate = fate(&segment, data);
            (segment, fate)
        })
        .collect();
    let count = |is: fn(&Fate) -> bool| judged.iter().filter(|(_, fate)| is(fate)).count();
    let (in_use, waiting) = (count(|fate| matches!(fate, Fate::InUse)), count(|fate| matches!(fate, Fate::Waits)));
    let mut findings: Vec<Finding> = judged.iter().filter_map(|(segment, fate)| leftover(segment, fate)).collect();
    if findings.is_empty() {
        let found = format!("{in_use} in use, {waiting} of nodes that do not run, none left behind");
        return vec![Finding::new(Good, WHAT, found, "no memory is lost to nodes that are gone")];
    }
    if findings.len() > MOST_NAMED {
        let more = findings.len() - MOST_NAMED;
        findings.truncate(MOST_NAMED);
        findings.push(Finding::new(Note, WHAT, format!("{more} more"), "remove those named, then look again"));
    }
    findings
}

fn fate(segment: &FoundSegment, data: &Path) -> Fate {
    let is_of = |folder: &Path| DataFolder::node_of(folder) == Some(segment.node);
    match &segment.owner {
        _ if segment.is_in_use => Fate::InUse,
        Some(owner) if is_of(owner) => Fate::Waits,
        // Moved, to where this node would look for it.
        _ if is_of(data) => Fate::Waits,
        Some(owner) => Fate::LeftBehind(owner.clone()),
        None => Fate::Unknown,
    }
}

fn leftover(segment: &FoundSegment, fate: &Fate) -> Option<Finding> {
    let FoundSegment { path, node, bytes, .. } = segment;
    let held = format!("{}: {} of node {node}", path.display(), size(*bytes));
    let remove = format!("rm {}", quoted(path));
    match fate {
        Fate::InUse | Fate::Waits => None,
        Fate::LeftBehind(owner) => {
            let found = format!("{held}, whose data folder {} is gone", owner.display());
            Some(Finding::new(Note, WHAT, found, format!("nobody reads it again; it is freed by: {remove}")))
        }
        Fate::Unknown => {
            let found = format!("{held}, which does not run; which data folder it had is not noted");
            Some(Finding::new(Note, WHAT, found, format!("if that folder is gone, it is freed by: {remove}")))
        }
    }
}

/// As a shell takes it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    if text.chars().all(|c| c.is_ascii_alphanumeric() || "/-_.".contains(c)) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tidepool_metadata::Incarnation;
    use tidepool_tiers::memory::{MemoryConfig, MemoryTier};

    use super::*;

    const BYTES: u64 = 1 << 20;

    fn segment(folder: &Path, name: &str, data: Option<&Path>, node: tidepool_metadata::NodeId) -> Arc<MemoryTier> {
        let config = MemoryConfig {
            folder: Some(folder.to_owned()),
            name: name.into(),
            owner: data.map(Path::to_owned),
            capacity_bytes: BYTES,
            survive_restart: true,
            node,
            incarnation: Incarnation(1),
        };
        MemoryTier::open(&config).expect("a segment").0
    }

    fn closed(tier: Arc<MemoryTier>) {
        tier.close(true);
        drop(tier);
    }

    #[test]
    fn a_segment_whose_data_folder_was_deleted_is_named_with_its_size_and_what_frees_it() {
        let (shm, data) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let folder = |name: &str| data.path().join(name);
        let node = |name: &str| DataFolder::open(&folder(name)).expect("a data folder").node();
        let look = || {
            let config = Config {
                data: Some(folder("mine")),
                dram: crate::config::Dram { folder: Some(shm.path().into()), ..Default::default() },
                ..Config::default()
            };
            look(&config)
        };
        let _runs = segment(shm.path(), "tidepool-runs", Some(&folder("runs")), node("runs"));
        closed(segment(shm.path(), "tidepool-waits", Some(&folder("waits")), node("waits")));
        // An earlier program's, which did not note the folder; and one whose folder was moved to where we look.
        closed(segment(shm.path(), "tidepool-mine", None, node("mine")));
        std::fs::write(shm.path().join("foreign"), vec![7; 4096]).expect("a file");
        let findings = look();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].verdict, Good);
        assert!(findings[0].found.contains("1 in use, 2 of nodes that do not run"), "{findings:?}");

        let gone = node("gone");
        closed(segment(shm.path(), "tidepool-gone", Some(&folder("gone")), gone));
        std::fs::remove_dir_all(folder("gone")).expect("deleted");
        closed(segment(shm.path(), "tidepool-old", None, tidepool_metadata::NodeId(77)));
        let findings = look();
        let named: Vec<&str> = findings.iter().map(|finding| finding.found.as_str()).collect();
        assert!(findings.iter().all(|finding| finding.verdict == Note) && named.len() == 2, "{named:?}");
        let path = shm.path().join("tidepool-gone");
        assert!(named[0].starts_with(&format!("{}: ", path.display())), "{}", named[0]);
        assert!(named[0].contains("MiB") && named[0].contains(&format!("{} is gone", folder("gone").display())));
        assert!(findings[0].follows.ends_with(&format!("rm {}", path.display())), "{}", findings[0].follows);
        assert!(named[1].contains("tidepool-old") && findings[1].follows.contains("if that folder is gone"));

        // A folder of the same name is another node's.
        assert_ne!(node("gone"), gone);
        assert_eq!(look().len(), 2);
        std::fs::remove_file(path).expect("what the doctor said");
        assert_eq!(look().len(), 1);
    }

    #[test]
    fn a_path_is_quoted_where_a_shell_would_take_it_apart() {
        assert_eq!(quoted(Path::new("/dev/shm/tidepool-1")), "/dev/shm/tidepool-1");
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }
}
