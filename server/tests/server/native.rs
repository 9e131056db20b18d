//! The native client's data path: messages and values over the transfer engine, and gRPC where that is not to be had.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use bytes::Bytes;
use tidepool_client::{
    BatchGot, Client, ClientBuilder, ClientSettings, ErrorKind, Existence, GetOptions, LendableMemory, OneSidedReads,
    PutOptions, PutOutcome, RemoveOutcome,
};

use crate::common::TestServer;

fn value(length: usize, seed: usize) -> Bytes {
    (0..length).map(|index| ((index + seed) * 7 % 251) as u8).collect()
}

fn builder(server: &TestServer) -> ClientBuilder {
    // Not by the segment, which would need no call.
    let settings = ClientSettings { local_reads: false, ..ClientSettings::default() };
    Client::builder().endpoint(server.server.addresses().grpc.to_string()).settings(settings)
}

fn client(server: &TestServer) -> Client {
    builder(server).build().unwrap()
}

async fn objects_come_back(client: &Client) {
    let options = PutOptions::default();
    for length in [0, 1, 4096, 32 << 10, (32 << 10) + 1, 1 << 20, (4 << 20) + 1, 9_000_001, 16 << 20, 20_000_001] {
        let (key, bytes) = (format!("k{length}"), value(length, 1));
        let before = client.native_calls();
        assert_eq!(client.put(&key, bytes.clone(), &options).await.unwrap().outcome, PutOutcome::Stored, "{length}");
        assert_eq!(client.put(&key, value(7, 2), &options).await.unwrap().outcome, PutOutcome::AlreadyExists);
        let found = client.get(&key).await.unwrap().expect("just put");
        assert!(found.value == bytes && found.info.length == length as u64, "{length}");
        let mut buffer = vec![1; length + 3];
        client.get_into(&key, &mut buffer).await.unwrap().expect("just put");
        assert!(buffer[..length] == bytes && buffer[length..] == [1, 1, 1]);
        let (offset, count) = (length / 3, length / 2);
        let range = client.get_range(&key, offset as u64, count as u64).await.unwrap().expect("just put");
        assert!(range.value == bytes[offset..offset + count], "{length}");
        assert!(client.native_calls() >= before + 4, "{length} bytes go by the engine");
        let mut given = Vec::new();
        let mut take = |at: u64, step: &[u8]| {
            assert_eq!(at, given.len() as u64);
            given.extend_from_slice(step);
        };
        client.get_steps(&key, GetOptions::default(), length as u64, &mut take).await.unwrap().expect("just put");
        assert!(given == bytes, "{length}");
    }
    let found = client.exists_many(&["k0", "none", "k1"], None, false).await.unwrap();
    assert_eq!(found, [Existence::Present, Existence::Missing, Existence::Present]);
    assert_eq!(client.get("none").await.unwrap(), None);
    let batch: Vec<(String, Bytes)> = (0..50).map(|index| (format!("b{index}"), value(90_000, index))).collect();
    assert!(
        client.put_batch(&batch, &options).await.unwrap().iter().all(|done| matches!(done, Ok(PutOutcome::Stored)))
    );
    let keys: Vec<&str> = batch.iter().map(|(key, _)| key.as_str()).chain(["none", "k9000001"]).collect();
    let got = client.get_batch(&keys).await.unwrap();
    for (got, (_, bytes)) in got.iter().zip(&batch) {
        assert!(matches!(got, BatchGot::Found(object) if object.value == bytes));
    }
    assert!(matches!(got[50], BatchGot::Missing));
    assert!(matches!(&got[51], BatchGot::Found(object) if object.value == value(9_000_001, 1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_all_sizes_come_back_by_the_engine() {
    let server = TestServer::with(&["dram.capacity=128MiB"]).await;
    objects_come_back(&client(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_all_sizes_come_back_by_tcp() {
    let server = TestServer::with(&["dram.capacity=128MiB"]).await;
    let settings = ClientSettings { same_host: false, ..ClientSettings::default() };
    let client = builder(&server).settings(settings).build().unwrap();
    objects_come_back(&client).await;
    assert_eq!(client.local_hits(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_about_keys_go_by_the_engine() {
    let server = TestServer::start().await;
    let client = client(&server);
    for key in ["a/1", "a/2", "b"] {
        client.put(key, value(1000, 1), &PutOptions::default()).await.unwrap();
    }
    let before = client.native_calls();
    assert_eq!(client.pin(&["a/1", "none"]).await.unwrap(), [true, false]);
    assert_eq!(client.remove("a/1", false).await.unwrap(), RemoveOutcome::Pinned);
    assert_eq!(client.unpin(&["a/1", "none"]).await.unwrap(), [true, false]);
    let minute = Duration::from_secs(60);
    let leases = client.renew_leases(&["a/1", "none"], Some(minute)).await.unwrap();
    assert!(leases[0] > Duration::ZERO && leases[1] == Duration::ZERO);
    client.release_leases(&["a/1"]).await.unwrap();
    let listed = client.list(b"a/", 1, "", None).await.unwrap();
    assert_eq!((listed.objects.len(), listed.objects[0].length), (1, 1000));
    let rest = client.list(b"a/", 0, &listed.next_page_token, None).await.unwrap();
    assert_eq!((rest.objects.len(), rest.next_page_token.as_str()), (1, ""));
    assert_eq!(client.list(b"", 0, "nonsense", None).await.unwrap_err().reason(), "BAD_PAGE_TOKEN");
    assert_eq!(client.stat("b").await.unwrap().unwrap().length, 1000);
    assert!(client.stat("none").await.unwrap().is_none());
    assert_eq!(
        client.remove_many(&["a/1", "none"], false).await.unwrap(),
        [RemoveOutcome::Removed, RemoveOutcome::Missing]
    );
    assert_eq!(client.native_calls() - before, 11);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_values_wait_for_room_where_they_are() {
    let server = TestServer::with(&["dram.capacity=64MiB", "nvme.capacity=256MiB"]).await;
    let settings = ClientSettings { local_reads: false, same_host: false, ..ClientSettings::default() };
    let client = builder(&server).settings(settings).build().unwrap();
    // Each needs the room of others, which go to disk for it.
    for index in 0..6 {
        client.put(format!("k{index}"), value(30 << 20, index), &PutOptions::default()).await.unwrap();
    }
    for index in 0..6 {
        assert!(client.get(format!("k{index}")).await.unwrap().unwrap().value == value(30 << 20, index), "{index}");
    }
    assert_eq!(server.tier("dram", "reserved").await, 0);
}

/// A client that reads the node's memory by whatever there is.
fn one_sided(server: &TestServer) -> Client {
    let one_sided_reads = OneSidedReads::Always;
    builder(server)
        .settings(ClientSettings { same_host: false, one_sided_reads, ..ClientSettings::default() })
        .build()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_read_where_they_lie() {
    let server = TestServer::with(&["dram.capacity=256MiB"]).await;
    let (client, store) = (one_sided(&server), server.server.node().service().store());
    objects_come_back(&client).await;
    // Get, get_into and get_steps of the five sizes from 64 KiB on, and the batch with one of them.
    assert_eq!(client.one_sided_reads(), 3 * 5 + 51);
    // Staged in the client's memory and read from there: those from 32 KiB to 4 MiB, and two messages of the batch.
    assert_eq!(client.one_sided_puts(), 3 + 2);
    // More than may be held comes with the answer.
    let large = value(65 << 20, 1);
    client.put("large", large.clone(), &PutOptions::default()).await.unwrap();
    assert!(client.get("large").await.unwrap().unwrap().value == large);
    assert_eq!(client.one_sided_reads(), 3 * 5 + 51);
    // Holds end when the bytes were read.
    while store.holds() != (0, 0) {
        tokio::task::yield_now().await;
    }
    // A node that is another one, with other memory.
    let addresses = server.server.addresses().clone();
    let mut stopped = server.stop().await.0;
    stopped.configure(|config| {
        config.grpc.listen = addresses.grpc;
        config.engine.listen = addresses.engine;
    });
    let server = stopped.start().await;
    server.reconciled().await;
    assert!(client.get("k1048576").await.unwrap().unwrap().value == value(1 << 20, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_reads_values_where_they_lie_in_lendable_memory() {
    let server = TestServer::with(&["dram.capacity=256MiB"]).await;
    let (client, store) = (one_sided(&server), server.server.node().service().store());
    let bytes = value(8 << 20, 1);
    let memory = lendable(&bytes);
    let options = PutOptions::default();
    for (index, range) in [0..8 << 20, 1..100_000, 3 << 20..(3 << 20) + 70_001].into_iter().enumerate() {
        client.put(format!("k{index}"), memory.slice(range.clone()), &options).await.unwrap();
        assert!(client.get(format!("k{index}")).await.unwrap().unwrap().value == bytes[range]);
    }
    let items: Vec<(String, Bytes)> =
        (0..20).map(|index| (format!("b{index}"), memory.slice(index * 100_000..(index + 1) * 100_000))).collect();
    assert!(client.put_batch(&items, &options).await.unwrap().iter().all(Result::is_ok));
    for (key, bytes) in &items {
        assert!(client.get(key).await.unwrap().unwrap().value == *bytes);
    }
    assert_eq!((client.lent_puts(), client.one_sided_puts()), (4, 4));
    // A message of more than 64 KiB of keys, and places.
    let many: Vec<(String, Bytes)> =
        (0..1000).map(|index| (format!("{index:0>64}"), memory.slice(index * 100..index * 100 + 64))).collect();
    assert!(client.put_batch(&many, &options).await.unwrap().iter().all(Result::is_ok));
    assert_eq!((client.lent_puts(), client.one_sided_puts()), (5, 5));
    for (key, bytes) in many.iter().step_by(97) {
        assert!(client.get(key).await.unwrap().unwrap().value == *bytes);
    }
    // A client that is gone: what the node knows of it is no use.
    drop(client);
    let client = one_sided(&server);
    client.put("again", memory.slice(0..1 << 20), &options).await.unwrap();
    assert_eq!(client.one_sided_puts(), 1);
    let reserved = store.tiers_report().iter().map(|tier| tier.reserved).sum::<u64>();
    assert_eq!(reserved, 0);
}

#[tokio::test]
async fn a_runtime_of_one_thread_is_not_blocked() {
    let server = TestServer::with(&["dram.capacity=128MiB"]).await;
    objects_come_back(&client(&server)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_on_disk_come_back_by_the_engine() {
    let server = TestServer::with(&["dram.capacity=16MiB", "nvme.capacity=128MiB"]).await;
    let client = client(&server);
    for index in 0..40 {
        client.put(format!("k{index}"), value(1_000_001, index), &PutOptions::default()).await.unwrap();
    }
    for index in 0..40 {
        let found = client.get(format!("k{index}")).await.unwrap().expect("DRAM or disk has it");
        assert!(found.value == value(1_000_001, index), "{index}");
    }
    assert!(server.tier("nvme", "hits").await > 0 && client.native_calls() >= 80);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_node_refuses_has_its_reason() {
    let server = TestServer::with(&["limits.max_object_bytes=1MiB"]).await;
    let client = client(&server);
    client.put("k", value(100, 1), &PutOptions::default()).await.unwrap();
    let large = client.put("large", value((1 << 20) + 1, 1), &PutOptions::default()).await.unwrap_err();
    assert_eq!((large.kind(), large.reason()), (ErrorKind::Invalid, "VALUE_TOO_LARGE"));
    let beyond = client.get_range("k", 99, 2).await.unwrap_err();
    assert_eq!((beyond.kind(), beyond.reason()), (ErrorKind::Invalid, "BAD_RANGE"));
    let version = GetOptions { version: "nonsense".into(), ..GetOptions::default() };
    assert_eq!(client.get_with("k", version).await.unwrap_err().reason(), "BAD_VERSION");
    let mut small = [0; 10];
    assert_eq!(client.get_into("k", &mut small).await.unwrap_err().reason(), "BAD_RANGE");
    let stranger = builder(&server).tenant("nobody").build().unwrap();
    let unknown = stranger.put("k", value(10, 1), &PutOptions::default()).await.unwrap_err();
    assert_eq!(unknown.reason(), "UNKNOWN_TENANT");
    assert_eq!(server.tier("dram", "reserved").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_engine_all_goes_by_grpc() {
    let server = TestServer::with(&["engine.enabled=false"]).await;
    let client = client(&server);
    client.put("k", value(100_000, 1), &PutOptions::default()).await.unwrap();
    assert!(client.get("k").await.unwrap().expect("just put").value == value(100_000, 1));
    assert_eq!(client.native_calls(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_goes_on_when_its_node_has_restarted() {
    let server = TestServer::start().await;
    let address = server.server.addresses().grpc;
    let client = client(&server);
    client.put("k", value(100_000, 1), &PutOptions::default()).await.unwrap();
    let (mut stopped, _) = server.stop().await;
    // The same gRPC address; the engine listens elsewhere.
    stopped.configure(|config| {
        config.grpc.listen = address;
        config.engine.listen = Some(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
    });
    let server = stopped.start().await;
    server.reconciled().await;
    assert!(client.get("k").await.unwrap().expect("it was kept").value == value(100_000, 1));
    client.put("k2", value(100_000, 2), &PutOptions::default()).await.unwrap();
    assert!(client.get("k2").await.unwrap().expect("just put").value == value(100_000, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_asks_for_the_secret() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let server = TestServer::with(&[&format!("cluster.secret_file='{}'", secret.display())]).await;
    let holder = builder(&server).token("0123456789abcdef").build().unwrap();
    holder.put("k", value(100_000, 1), &PutOptions::default()).await.unwrap();
    assert_eq!(holder.native_calls(), 2, "a session and the put");
    let engine = server.server.addresses().engine.unwrap().to_string();
    let stranger = tidepool_transfer::Engine::start(tidepool_transfer::Settings::default()).unwrap();
    let soon = std::time::Instant::now() + Duration::from_secs(5);
    let refused = stranger.connect(&engine, soon).unwrap_err();
    assert!(refused.to_string().contains(&engine), "{refused}");
    let other = builder(&server).token("fedcba9876543210").build().unwrap();
    assert_eq!(other.get("k").await.unwrap_err().kind(), ErrorKind::Denied);
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_messages_are_refused_and_store_nothing() {
    use prost::Message as _;
    use tidepool_metadata::envelope;
    use tidepool_metadata::proto::{self, EngineMethod};
    let server = TestServer::start().await;
    let address = server.server.addresses().engine.unwrap();
    let engine = tidepool_transfer::Engine::start(tidepool_transfer::Settings::default()).unwrap();
    let soon = || std::time::Instant::now() + Duration::from_secs(10);
    let peer = engine.connect(&address.to_string(), soon()).unwrap();
    let ask = |bytes: &[u8]| {
        let reply = engine.call(peer, bytes, soon()).unwrap();
        let (is_done, length) = envelope::answer_head(*reply.first_chunk().unwrap()).unwrap();
        assert!(!is_done, "{bytes:?} is refused");
        let refusal = proto::Refusal::decode(&reply[envelope::ANSWER_BYTES..][..length]).unwrap();
        proto::ErrorDetail::decode(&refusal.details[..]).unwrap().reason
    };
    let put_of = |length: usize, change: fn(&mut proto::PutItemsRequest)| {
        let (keys, lengths) = (vec!["k".into()], vec![length as u64]);
        let mut message = proto::PutItemsRequest { keys, lengths, ..Default::default() };
        change(&mut message);
        let mut bytes = envelope::request(EngineMethod::Put, Duration::from_secs(5), &message);
        bytes.extend_from_slice(&value(length, 1));
        bytes
    };
    assert_eq!(ask(b""), "UNIMPLEMENTED");
    assert_eq!(ask(&[99; 64]), "UNIMPLEMENTED");
    assert_eq!(ask(&[4, 0, 0, 0, 0, 3, 0, 0, 0, 0xff, 0xff, 0xff]), "BAD_MESSAGE");
    // Values that come with their message, and that are taken as they come.
    for length in [3, 200_000, 3_000_000] {
        let put = |change| put_of(length, change);
        assert_eq!(ask(&put(|message| message.keys[0].clear())), "KEY_EMPTY");
        assert_eq!(ask(&put(|message| message.lengths.clear())), "LENGTH_MISMATCH");
        assert_eq!(ask(&put(|message| message.lengths[0] = 2)), "LENGTH_MISMATCH");
        assert_eq!(ask(&put(|message| message.lengths[0] += 1)), "LENGTH_MISMATCH");
        assert_eq!(ask(&put(|message| message.lengths[0] = u64::MAX)), "LENGTH_MISMATCH");
        assert_eq!(ask(&put(|message| message.checksums = vec![1])), "CHECKSUM_MISMATCH");
        assert_eq!(ask(&put(|message| message.checksums = vec![1, 2])), "LENGTH_MISMATCH");
        let memory = ask(&put(|message| message.memory = Some(proto::LentMemory::default())));
        assert_eq!(memory, if length == 3 { "NOT_LENT" } else { "LENGTH_MISMATCH" });
        let readable = ask(&put(|message| message.readable = Some(proto::ReadableMemory::default())));
        assert_eq!(readable, "LENGTH_MISMATCH", "values behind it, too");
        assert_eq!(ask(&put_of(length, |message| message.tenant = "nobody".into())), "UNKNOWN_TENANT");
        let mut cut = put(|_| {});
        cut[5..9].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(ask(&cut), "UNIMPLEMENTED", "a message longer than all of it");
    }
    // Values that the node is to read itself, where there are none.
    let readable = |change: fn(&mut proto::ReadableMemory)| {
        let (port, key, offsets) = (1, vec![0; 16].into(), vec![0]);
        let admission = vec![0; 32].into();
        let mut readable = proto::ReadableMemory { port, region: 1, key, length: 1 << 20, offsets, admission };
        change(&mut readable);
        let (keys, lengths) = (vec!["k".into()], vec![100_000]);
        let message = proto::PutItemsRequest { keys, lengths, readable: Some(readable), ..Default::default() };
        ask(&envelope::request(EngineMethod::Put, Duration::from_secs(1), &message))
    };
    assert_eq!(readable(|readable| readable.offsets.clear()), "LENGTH_MISMATCH");
    assert_eq!(readable(|readable| readable.offsets[0] = u64::MAX), "BAD_RANGE");
    assert_eq!(readable(|readable| readable.length = 99_999), "BAD_RANGE");
    // Over a unix socket nobody knows where the client is; else nothing listens there.
    assert_eq!(readable(|_| ()), "NOT_READ");
    assert_eq!(readable(|readable| readable.port = 1 << 16), "NOT_READ");
    assert_eq!(readable(|readable| readable.key.clear()), "NOT_READ");
    assert_eq!(readable(|readable| readable.admission.clear()), "NOT_READ");
    // Bytes that are no frame at all end their connection, and nothing else.
    let mut garbage = std::net::TcpStream::connect(address).unwrap();
    garbage.write_all(&[0x55; 4096]).unwrap();
    let _closed = garbage.read_to_end(&mut Vec::new());
    server.assert_nothing_stored().await;
}

/// Passes on what comes to `address`, `most` bytes of it, then ends both connections.
fn cut_after(most: u64, address: std::net::SocketAddr) -> std::net::SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming().map(Result::unwrap) {
            let node = std::net::TcpStream::connect(address).unwrap();
            let (mut from_node, mut to_client) = (node.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from_node, &mut to_client));
            let _sent = std::io::copy(&mut std::io::Read::take(&client, most), &mut &node);
            for connection in [node, client] {
                let _ended = connection.shutdown(std::net::Shutdown::Both);
            }
        }
    });
    here
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_that_is_cut_off_in_the_middle_leaves_nothing() {
    use tidepool_metadata::envelope;
    use tidepool_metadata::proto::{self, EngineMethod};
    let server = TestServer::with(&["dram.capacity=64MiB"]).await;
    let address = server.server.addresses().engine.unwrap();
    // Past the connection that is cut there would be another way to a node on this host.
    let settings = tidepool_transfer::Settings { same_host: false, ..tidepool_transfer::Settings::default() };
    let engine = tidepool_transfer::Engine::start(settings).unwrap();
    let soon = || std::time::Instant::now() + Duration::from_secs(10);
    let message = proto::PutItemsRequest {
        keys: (0..3).map(|key| format!("k{key}").into()).collect(),
        lengths: vec![1_000_000; 3],
        ..Default::default()
    };
    let mut put = envelope::request(EngineMethod::Put, Duration::from_secs(5), &message);
    put.extend_from_slice(&value(3_000_000, 1));
    // More often than the tier has room for what would be left reserved.
    for cut in (0..60).map(|cut| 100_000 + cut * 45_000) {
        let peer = engine.connect(&cut_after(cut, address).to_string(), soon()).unwrap();
        engine.call(peer, &put, soon()).expect_err("its connection is cut");
    }
    let freed = async {
        while server.tier("dram", "reserved").await != 0 {
            // The node has not seen the end of the last connection yet.
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), freed).await.expect("nothing stays reserved");
    server.assert_nothing_stored().await;
    let (client, all) = (client(&server), value(14 << 20, 2));
    for key in 0..3 {
        let done = client.put(format!("whole{key}"), all.clone(), &PutOptions::default()).await.unwrap();
        assert_eq!(done.outcome, PutOutcome::Stored);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lent_memory_is_copied_within_its_bounds_and_gone_with_its_lender() {
    use prost::Message as _;
    use tidepool_metadata::envelope;
    use tidepool_metadata::proto::{self, EngineMethod};
    use tidepool_transfer::{Engine, Lent, Memory, PeerMapping, Settings};
    let server = TestServer::start().await;
    let memory = Memory::shared(8192, PeerMapping::ReadOnly).unwrap();
    let bytes = value(8192, 3);
    memory.write_at(0, &bytes).unwrap();
    let socket = server.data().join("memory.sock");
    let lent = tokio::task::block_in_place(|| Lent::new(&socket, &memory)).unwrap();
    let engine = Engine::start(Settings::default()).unwrap();
    let soon = || std::time::Instant::now() + Duration::from_secs(10);
    let peer = engine.connect(&server.server.addresses().engine.unwrap().to_string(), soon()).unwrap();
    let put_when = |withdrawals: Option<u64>, key: &'static str, offset: u64, length: u64, checksums: &[u32]| {
        let id = lent.id().to_le_bytes().to_vec().into();
        let memory = proto::LentMemory { id, offsets: vec![offset], withdrawals };
        let (keys, lengths, checksums) = (vec![key.into()], vec![length], checksums.to_vec());
        let message = proto::PutItemsRequest { keys, lengths, checksums, memory: Some(memory), ..Default::default() };
        let request = envelope::request(EngineMethod::Put, Duration::from_secs(5), &message);
        let reply = engine.call(peer, &request, soon()).unwrap();
        let (is_done, _) = envelope::answer_head(*reply.first_chunk().unwrap()).unwrap();
        let message = &reply[envelope::ANSWER_BYTES..];
        let reason = |refusal: proto::Refusal| proto::ErrorDetail::decode(&refusal.details[..]).unwrap().reason;
        if is_done { "done".to_owned() } else { reason(proto::Refusal::decode(message).unwrap()) }
    };
    let put = |key, offset, length, checksums: &[u32]| put_when(None, key, offset, length, checksums);
    assert_eq!(put("k", 100, 8000, &[]), "done");
    assert!(client(&server).get("k").await.unwrap().expect("just put").value == bytes[100..8100]);
    assert_eq!(put("beyond", 1, 8192, &[]), "BAD_RANGE");
    assert_eq!(put("overflow", u64::MAX, 2, &[]), "BAD_RANGE");
    // Their owner changed the bytes between the sum and the copy.
    let sum = crc32fast::hash(&bytes);
    memory.write_at(8191, b"!").unwrap();
    assert_eq!(put("changed", 0, 8192, &[sum]), "CHECKSUM_MISMATCH");
    assert!(client(&server).get("changed").await.unwrap().is_none());
    memory.write_at(8191, &bytes[8191..]).unwrap();
    assert_eq!(put("changed", 0, 8192, &[sum]), "done");
    // The first word is another than when the put began, or there is none.
    let count = u64::from_le_bytes(*bytes.first_chunk().unwrap());
    assert_eq!(put_when(Some(count + 1), "withdrawn", 100, 8000, &[]), "WITHDRAWN");
    assert!(client(&server).get("withdrawn").await.unwrap().is_none());
    assert_eq!(put_when(Some(count), "withdrawn", 100, 8000, &[]), "done");
    let gone = lent.id();
    drop(lent);
    let lent = tokio::task::block_in_place(|| Lent::new(&socket, &memory)).unwrap();
    assert_ne!(gone, lent.id());
    let message = proto::PutItemsRequest {
        keys: vec!["late".into()],
        lengths: vec![1],
        memory: Some(proto::LentMemory { id: gone.to_le_bytes().to_vec().into(), offsets: vec![0], withdrawals: None }),
        ..Default::default()
    };
    let request = envelope::request(EngineMethod::Put, Duration::from_secs(5), &message);
    let refused = async {
        while engine.call(peer, &request, soon()).unwrap()[0] == 0 {
            // The node has not seen the end of the lender's connection yet: the put was of a key that is there.
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), refused).await.expect("the memory is gone");
}

/// Memory with these bytes that the node can be lent.
fn lendable(bytes: &[u8]) -> Bytes {
    let mut memory = LendableMemory::allocate(bytes.len()).unwrap();
    memory.copy_from_slice(bytes);
    Bytes::from_owner(memory)
}

#[tokio::test(flavor = "multi_thread")]
async fn values_in_lendable_memory_are_copied_by_the_node_alone() {
    let server = TestServer::with(&["dram.capacity=128MiB"]).await;
    let (client, options) = (client(&server), PutOptions::default());
    let memory = lendable(&value(20 << 20, 1));
    let mut puts = 0;
    for (offset, length) in
        [(0, 32 << 10), (1, 32 << 10), (4097, 1 << 20), (77, (4 << 20) + 1), ((5 << 20) - 1, 15 << 20)]
    {
        let (key, bytes) = (format!("k{offset}"), memory.slice(offset..offset + length));
        assert_eq!(client.put(&key, bytes.clone(), &options).await.unwrap().outcome, PutOutcome::Stored);
        puts += 1;
        assert_eq!(client.lent_puts(), puts, "{length} bytes");
        assert!(client.get(&key).await.unwrap().expect("just put").value == bytes);
    }
    // 200 KiB each, and one of none, in one message.
    let batch: Vec<(String, Bytes)> = (0..30)
        .map(|index| (format!("b{index}"), memory.slice(index * 300_001..index * 300_001 + 200_000)))
        .chain([("empty".into(), Bytes::new())])
        .collect();
    assert!(
        client.put_batch(&batch, &options).await.unwrap().iter().all(|done| matches!(done, Ok(PutOutcome::Stored)))
    );
    assert_eq!(client.lent_puts(), puts + 1);
    for (key, bytes) in &batch {
        assert!(client.get(key).await.unwrap().expect("just put").value == *bytes, "{key}");
    }
    // Small ones, and those that lie elsewhere too, go as others do.
    client.put("small", memory.slice(0..100), &options).await.unwrap();
    let mixed = [("in", memory.slice(0..100_000)), ("out", value(100_000, 2))];
    assert!(client.put_batch(&mixed, &options).await.unwrap().iter().all(Result::is_ok));
    assert_eq!(client.lent_puts(), puts + 1);
    // However large.
    client.put("large", memory.slice(0..16 << 20), &options).await.unwrap();
    assert_eq!(client.lent_puts(), puts + 2);
    for (key, bytes) in [&mixed[0], &mixed[1], &("large", memory.slice(0..16 << 20))] {
        assert!(client.get(key).await.unwrap().expect("just put").value == *bytes, "{key}");
    }
}

/// Several threads of the node copy such a message: each outcome, and each value, is that of its own key all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_batch_in_lendable_memory_has_the_outcome_of_each_item_in_its_place() {
    const MIB: usize = 1 << 20;
    let server = TestServer::with(&["dram.capacity=128MiB", "limits.max_object_bytes=3MiB"]).await;
    let (client, options) = (client(&server), PutOptions::default());
    let memory = lendable(&value(32 * MIB, 1));
    // It is lent with the first put that is worth it.
    client.put("k5", memory.slice(0..MIB), &options).await.unwrap();
    // Of 1 MiB and less, but one that is too large, one that is there already, and two of one key.
    let range = |index: usize| match index {
        9 => 0..3 * MIB + 1,
        _ => index * MIB + index..(index + 1) * MIB,
    };
    let key = |index: usize| format!("k{}", if index == 17 { 16 } else { index });
    let batch: Vec<(String, Bytes)> = (0..30).map(|index| (key(index), memory.slice(range(index)))).collect();
    let before = client.lent_puts();
    let outcomes = client.put_batch(&batch, &options).await.unwrap();
    assert_eq!(client.lent_puts() - before, 3, "messages of at most 12 MiB");
    for (index, outcome) in outcomes.iter().enumerate() {
        match (index, outcome) {
            (9, Err(error)) => assert_eq!(error.reason(), "VALUE_TOO_LARGE"),
            (5 | 17, Ok(PutOutcome::AlreadyExists)) => {}
            (5 | 9 | 17, other) => panic!("{index}: {other:?}"),
            (_, other) => assert!(matches!(other, Ok(PutOutcome::Stored)), "{index}: {other:?}"),
        }
    }
    for (index, (key, bytes)) in batch.iter().enumerate().filter(|(index, _)| ![5, 9, 17].contains(index)) {
        assert!(client.get(key).await.unwrap().expect("just put").value == *bytes, "{index}");
    }
    assert!(client.get("k9").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn lendable_memory_is_lent_anew_to_a_node_that_has_restarted() {
    let server = TestServer::start().await;
    let address = server.server.addresses().grpc;
    let engine = server.server.addresses().engine;
    let client = client(&server);
    let memory = lendable(&value(1 << 20, 1));
    client.put("k", memory.slice(0..100_000), &PutOptions::default()).await.unwrap();
    let (mut stopped, _) = server.stop().await;
    stopped.configure(|config| {
        config.grpc.listen = address;
        config.engine.listen = engine;
    });
    let server = stopped.start().await;
    server.reconciled().await;
    let before = client.lent_puts();
    // The first may go by gRPC, because the link has ended; the engine is tried again a second later.
    let lent_again = async {
        for number in 0.. {
            client
                .put(format!("k{number}"), memory.slice(number..100_000 + number), &PutOptions::default())
                .await
                .unwrap();
            if client.lent_puts() > before {
                return number;
            }
        }
        unreachable!("numbers don't end")
    };
    let last = tokio::time::timeout(Duration::from_secs(20), lent_again).await.expect("lent anew");
    let found = client.get(format!("k{last}")).await.unwrap().expect("just put");
    assert!(found.value == memory.slice(last..100_000 + last));
}

/// Connections of this process over which memory is lent, those that have not ended.
fn lenders(server: &TestServer) -> Vec<std::os::unix::net::UnixStream> {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let (own, socket) = (pidfd_open(getpid(), PidfdFlags::empty()).unwrap(), server.data().join("memory.sock"));
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    let number = |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let open = descriptors.filter_map(number).filter_map(|fd| pidfd_getfd(&own, fd, PidfdGetfdFlags::empty()).ok());
    let streams = open.map(std::os::unix::net::UnixStream::from);
    let lends = |stream: &std::os::unix::net::UnixStream| {
        stream.peer_addr().is_ok_and(|peer| peer.as_pathname() == Some(&*socket))
            && stream.set_nonblocking(true).is_ok()
            && { stream }.read(&mut [0]).is_err()
    };
    streams.filter(lends).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_the_node_has_no_more_is_lent_anew_within_the_put() {
    let server = TestServer::start().await;
    let client = client(&server);
    let memory = lendable(&value(1 << 20, 1));
    client.put("first", memory.slice(0..100_000), &PutOptions::default()).await.unwrap();
    lenders(&server).iter().for_each(|lender| lender.shutdown(std::net::Shutdown::Both).unwrap());
    let mut puts = 1;
    let anew = async {
        // Until the node has seen the end, it copies from the old mapping.
        while lenders(&server).is_empty() {
            let bytes = memory.slice(puts..100_000 + puts);
            client.put(format!("k{puts}"), bytes, &PutOptions::default()).await.unwrap();
            puts += 1;
            assert_eq!(client.lent_puts(), puts as u64, "each was copied from where it lay");
        }
    };
    tokio::time::timeout(Duration::from_secs(20), anew).await.expect("lent anew");
    let last = puts - 1;
    assert!(
        client.get(format!("k{last}")).await.unwrap().expect("just put").value == memory.slice(last..100_000 + last)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_beyond_the_limits_is_not_lent_and_its_values_go_another_way() {
    let server = TestServer::with(&["limits.lent_bytes=100MiB", "limits.lent_client_bytes=64MiB"]).await;
    let (client, options) = (client(&server), PutOptions::default());
    let put = async |key: &str, memory: &Bytes, is_lent: bool| {
        let before = client.lent_puts();
        client.put(key, memory.slice(0..1 << 20), &options).await.unwrap();
        assert_eq!(client.lent_puts() - before, u64::from(is_lent), "{key}");
        assert!(client.get(key).await.unwrap().expect("just put").value == memory.slice(0..1 << 20));
    };
    let (first, second) = (lendable(&[1; 40 << 20]), lendable(&[2; 20 << 20]));
    put("first", &first, true).await;
    put("second", &second, true).await;
    // A client's share, from which also the 32 MiB are that values are staged in: sent whole.
    let third = lendable(&[3; 8 << 20]);
    put("third", &third, false).await;
    drop(first);
    // The node may not have heard of it yet; this client does not ask for the third one again so soon.
    let fourth = async {
        let mut number = 0;
        loop {
            let (before, memory) = (client.lent_puts(), lendable(&[4; 8 << 20]));
            client.put(format!("fourth{number}"), memory.slice(0..100_000), &options).await.unwrap();
            number += 1;
            if client.lent_puts() > before {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), fourth).await.expect("there is room again");
}
