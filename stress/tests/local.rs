//! Readers on the node's host, which read its DRAM segment without a call: exact bytes, and only as long as they may.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use bytes::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use tidepool_client::workload::Payload;
use tidepool_client::{Client, ClientSettings, GetOptions, LendableMemory, Matching, PutOptions, StoredIn};
use tidepool_stress::node_process::{NodeOptions, NodeProcess, Place, program_beside};

struct Host {
    node: NodeProcess,
    _folders: [tempfile::TempDir; 2],
}

impl Host {
    fn start(dram_bytes: u64) -> Self {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
        let program = program_beside(&std::env::current_exe().unwrap()).expect("the tidepool binary is built");
        let data = folders[0].path().join("data");
        let settings =
            vec![format!("dram.folder='{}'", folders[1].path().display()), "store.slice_bytes=256KiB".into()];
        let node = NodeProcess::start(NodeOptions {
            program,
            data,
            dram_bytes,
            nvme_bytes: 0,
            settings,
            place: Place::default(),
        })
        .unwrap();
        Self { node, _folders: folders }
    }

    fn client(&self) -> Client {
        let socket = self.node.options().data.join("tidepool.sock");
        let client = Client::builder().endpoint(format!("unix:{}", socket.display()));
        client.deadline(Duration::from_secs(2)).build().unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.node.id().cast_signed()).unwrap(), signal).unwrap();
    }
}

/// The value of object `number`: everything follows from the number.
fn value(number: u64, length: usize) -> Bytes {
    Payload::of(number).bytes(length).into()
}

/// Reads until it is read locally: a node lets readers in when it and its catalog agree on what is there.
async fn until_local(client: &Client, key: &str) {
    let local = async {
        let before = client.local_hits();
        while client.local_hits() == before {
            client.get(key).await.unwrap().expect("it was put");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), local).await.expect("the node lets readers in");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_read_makes_no_call_and_ends_with_the_nodes_word() {
    let host = Host::start(64 << 20);
    let (writer, reader) = (host.client(), host.client());
    // One slice, several, none.
    let lengths = [("one", 100_000), ("many", 1_000_003), ("none", 0)];
    for (key, length) in lengths {
        writer.put(key, value(7, length), &PutOptions::default()).await.unwrap();
        until_local(&reader, key).await;
    }
    host.signal(Signal::STOP);
    for (key, length) in lengths {
        let found = reader.get(key).await.unwrap().expect("it was put");
        assert_eq!((found.value.clone(), found.info.tier), (value(7, length), StoredIn::Dram), "{key}");
        assert_eq!(found.info.checksum, Some(crc32fast::hash(&found.value)), "{key}");
        let mut buffer = vec![1; length + 10];
        let info = reader.get_into(key, &mut buffer).await.unwrap().expect("it was put");
        assert_eq!((info, &buffer[..length]), (found.info, &found.value[..]), "{key}");
    }
    let batch = reader.get_batch(&["many", "one"]).await.unwrap();
    assert_eq!(batch.into_iter().filter_map(tidepool_client::BatchGot::found).count(), 2);
    // Asked for as new as can be, or by one who wrote it: the node is asked, and it is stopped.
    let fresh = GetOptions { fresh: true, ..GetOptions::default() };
    reader.get_with("one", fresh).await.unwrap_err();
    writer.get("one").await.unwrap_err();
    // What the node said last holds for 5 s.
    let expired = async {
        while reader.get("one").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), expired).await.expect("a stopped node's word ends");
    host.signal(Signal::CONT);
    until_local(&reader, "one").await;
}

/// Lendable memory that comes back once nobody uses it.
struct Returned(Option<LendableMemory>, Sender<LendableMemory>);

impl AsRef<[u8]> for Returned {
    fn as_ref(&self) -> &[u8] {
        self.0.as_deref().unwrap()
    }
}

impl Drop for Returned {
    fn drop(&mut self) {
        self.1.send(self.0.take().unwrap()).unwrap();
    }
}

/// It copies from memory that has another value by then.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_frozen_node_copies_late_is_not_stored() {
    let host = Host::start(64 << 20);
    let (client, options) = (host.client(), PutOptions::default());
    let (give_back, back) = std::sync::mpsc::channel();
    let mut memory = LendableMemory::allocate(1 << 20).unwrap();
    for round in 0..2 {
        let lent = Returned(Some(memory), give_back.clone());
        let puts = client.lent_puts();
        let bytes = Bytes::from_owner(lent);
        client.put(format!("before{round}"), bytes.clone(), &options).await.unwrap();
        assert_eq!(client.lent_puts(), puts + 1);
        host.signal(Signal::STOP);
        let late = client.put(format!("late{round}"), bytes, &options).await;
        assert_eq!(late.unwrap_err().reason(), "DEADLINE");
        memory = back.recv().unwrap();
        let old = Bytes::copy_from_slice(&memory);
        memory.copy_from_slice(&value(round + 1, 1 << 20));
        host.signal(Signal::CONT);
        for _ in 0..20 {
            let found = client.get(format!("late{round}")).await.unwrap();
            assert!(found.is_none_or(|found| found.value == old), "another put's bytes");
            client.put(format!("after{round}"), old.clone(), &options).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_sees_its_own_writes_at_once() {
    let host = Host::start(64 << 20);
    let (client, upsert) = (host.client(), PutOptions { upsert: true, ..PutOptions::default() });
    host.client().put("k", value(0, 5000), &PutOptions::default()).await.unwrap();
    until_local(&client, "k").await;
    for round in 1..50 {
        client.put("k", value(round, 5000), &upsert).await.unwrap();
        assert_eq!(client.get("k").await.unwrap().unwrap().value, value(round, 5000));
    }
    client.remove("k", false).await.unwrap();
    assert_eq!(client.get("k").await.unwrap(), None);
    client.put("k", value(50, 5000), &upsert).await.unwrap();
    client.remove_matching(&Matching::All, false, |_| {}).await.unwrap();
    assert_eq!(client.get("k").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_has_written_itself_needs_no_call_either() {
    let host = Host::start(64 << 20);
    let (client, upsert) = (host.client(), PutOptions { upsert: true, ..PutOptions::default() });
    host.client().put("k", value(0, 5000), &PutOptions::default()).await.unwrap();
    until_local(&client, "k").await;
    client.remove_matching(&Matching::All, false, |_| {}).await.unwrap();
    for round in 1..50 {
        let hits = client.local_hits();
        client.put("k", value(round, 5000), &upsert).await.unwrap();
        assert_eq!(client.get("k").await.unwrap().unwrap().value, value(round, 5000));
        assert_eq!(client.local_hits(), hits + 1, "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_outlives_a_killed_node() {
    let mut host = Host::start(64 << 20);
    host.client().put("k", value(1, 300_000), &PutOptions::default()).await.unwrap();
    let reader = host.client();
    until_local(&reader, "k").await;
    for _ in 0..3 {
        host.node.kill().unwrap();
        host.node = host.node.restart().unwrap();
        until_local(&reader, "k").await;
        assert_eq!(reader.get("k").await.unwrap().unwrap().value, value(1, 300_000));
    }
}

/// Memory is freed and filled again under the readers all the time: what they get is what was put, or nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_get_no_wrong_byte_while_objects_are_evicted() {
    const LENGTH: usize = 20_000;
    /// Of which readers choose: about as many as there is room for.
    const RECENT: u64 = 800;
    /// Five times what there is room for.
    const PUTS: u64 = 4000;
    let host = Host::start(16 << 20);
    let next = Arc::new(AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let (client, next) = (host.client(), Arc::clone(&next));
        tasks.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= PUTS {
                    return 0;
                }
                client.put(format!("k/{number}"), value(number, LENGTH), &PutOptions::default()).await.unwrap();
            }
        });
    }
    for seed in 1..=2 {
        let (client, next) = (host.client(), Arc::clone(&next));
        tasks.spawn(async move {
            let (mut state, mut buffer) = (seed, vec![0; LENGTH]);
            loop {
                let newest = next.load(Ordering::Relaxed);
                if newest >= PUTS {
                    return client.local_hits();
                }
                state = u64::wrapping_mul(state, 0xd134_2543_de82_ef95).wrapping_add(1);
                let number = newest.saturating_sub((state >> 33) % RECENT);
                let Some(info) = client.get_into(format!("k/{number}"), &mut buffer).await.unwrap() else { continue };
                assert_eq!(info.length, LENGTH as u64);
                assert!(Payload::of(number).check(&buffer).is_ok(), "wrong bytes of k/{number}");
            }
        });
    }
    let hits: u64 = tasks.join_all().await.into_iter().sum();
    let evicted = host.node.tier("dram", "evictions").unwrap();
    assert!(hits > 1000 && evicted > 1000, "the load was real: {hits} local reads, {evicted} evictions");
}

/// Views of objects that are removed, replaced and evicted, while all that is free is filled with others'.
#[tokio::test(flavor = "multi_thread")]
async fn a_view_stays_what_it_was_whatever_becomes_of_the_object() {
    let host = Host::start(16 << 20);
    let (writer, reader, options) = (host.client(), host.client(), PutOptions::default());
    let lengths = [("one", 100_000), ("many", 1_000_003), ("replaced", 300_000)];
    for (key, length) in lengths {
        writer.put(key, value(7, length), &options).await.unwrap();
        until_local(&reader, key).await;
    }
    let mut views = Vec::new();
    for (key, length) in lengths {
        let view = reader.view(key).await.unwrap().expect("it was put");
        assert!(!view.is_copied() && view.len() == length);
        views.push(view);
    }
    writer.remove("one", true).await.unwrap();
    writer.put("replaced", value(8, 300_000), &PutOptions { upsert: true, ..options.clone() }).await.unwrap();
    for number in 100..400 {
        writer.put(format!("k/{number}"), value(number, 200_000), &options).await.unwrap();
    }
    assert!(host.node.tier("dram", "evictions").unwrap() > 100);
    for ((key, length), view) in lengths.iter().zip(&views) {
        assert!(view[..] == value(7, *length)[..], "{key}");
    }
    assert!(reader.view("one").await.unwrap().is_none());
    until_freed(&host, |used| used > 0).await;
    drop(views);
    writer.remove_matching(&Matching::All, true, |_| {}).await.unwrap();
    until_freed(&host, |used| used == 0).await;
}

async fn until_freed(host: &Host, is_so: impl Fn(u64) -> bool) {
    let freed = async {
        while !is_so(host.node.tier("dram", "used").unwrap()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), freed).await.expect("what nobody views is free");
}

/// A restarted node knows nothing of the views of its last life but what the system tells.
#[tokio::test(flavor = "multi_thread")]
async fn a_view_outlives_its_node_and_is_kept_by_the_next() {
    let mut host = Host::start(16 << 20);
    let (reader, options) = (host.client(), PutOptions::default());
    for key in ["removed", "stays"] {
        host.client().put(key, value(7, 1_000_003), &options).await.unwrap();
        until_local(&reader, key).await;
    }
    let views = [reader.view("removed").await.unwrap().unwrap(), reader.view("stays").await.unwrap().unwrap()];
    assert!(views.iter().all(|view| !view.is_copied()));
    host.client().remove("removed", true).await.unwrap();
    for round in 0..2 {
        host.node.kill().unwrap();
        assert!(views.iter().all(|view| view[..] == value(7, 1_000_003)[..]), "while there is no node");
        host.node = host.node.restart().unwrap();
        let writer = host.client();
        for number in 0..100 {
            let key = format!("k/{round}/{number}");
            writer.put(key, value(number, 200_000), &options).await.unwrap();
        }
        writer.remove_matching(&Matching::Prefix(b"k/".to_vec()), true, |_| {}).await.unwrap();
        assert!(views.iter().all(|view| view[..] == value(7, 1_000_003)[..]), "life {round}");
    }
    drop(views);
    host.client().remove_matching(&Matching::All, true, |_| {}).await.unwrap();
    until_freed(&host, |used| used == 0).await;
}

/// Objects that a node here does not have in DRAM, and clients that read nothing by themselves.
#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_lie_here_is_copied_and_too_much_is_refused() {
    let host = Host::start(16 << 20);
    let (client, options) = (host.client(), PutOptions::default());
    host.client().put("k", value(1, 3 << 20), &options).await.unwrap();
    host.client().put("l", value(2, 5000), &options).await.unwrap();
    until_local(&client, "l").await;
    assert_eq!(client.view("k").await.unwrap_err().reason(), "TOO_MANY_VIEWS", "an eighth of 16 MiB");
    let some = client.views(&["l", "none", "k", "l"]).await.unwrap();
    let lengths: Vec<_> =
        some.iter().map(|view| view.as_ref().ok().map(|view| view.as_ref().map(|view| view.len()))).collect();
    assert_eq!(lengths, [Some(Some(5000)), Some(None), None, Some(Some(5000))]);
    let local_reads = false;
    let elsewhere =
        Client::builder().endpoint(format!("unix:{}", host.node.options().data.join("tidepool.sock").display()));
    let elsewhere = elsewhere.settings(ClientSettings { local_reads, ..ClientSettings::default() }).build().unwrap();
    let view = elsewhere.view("k").await.unwrap().unwrap();
    assert!(view.is_copied() && view[..] == value(1, 3 << 20)[..]);
    let views = elsewhere.views(&["k", "none"]).await.unwrap();
    assert!(matches!(&views[..], [Ok(Some(view)), Ok(None)] if view.is_copied() && view.len() == 3 << 20));
}
