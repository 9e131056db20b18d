//! The client against a server that fails on demand.

mod fake;

use std::time::Duration;

use bytes::Bytes;
use tidepool_metadata::proto;
use tonic::{Code, Status};

use crate::{
    BatchGot, Client, ClientSettings, Error, ErrorKind, Existence, GetOptions, Matching, ObjectInfo, PutOptions,
    PutOutcome, RemoveOutcome, TaskKind, TaskState,
};
use fake::{Fake, status};

async fn connected() -> (Fake, Client) {
    let fake = Fake::default();
    let client = Client::builder().endpoint(fake.serve().await).token(" secret\n").build().expect("legal settings");
    (fake, client)
}

fn bytes(length: usize) -> Bytes {
    (0..length).map(|i| (i * 7 % 251) as u8).collect()
}

#[tokio::test]
async fn objects_of_all_sizes_come_back_whole() {
    let (fake, client) = connected().await;
    for length in [0, 1, 1 << 20, (1 << 20) + 1, 5_000_000] {
        let key = format!("k{length}");
        let done = client.put(&key, bytes(length), &PutOptions::default()).await.expect("stored");
        assert_eq!(done.outcome, PutOutcome::Stored);
        let object = client.get(&key).await.expect("no error").expect("is there");
        assert!(object.value == bytes(length) && object.info.length == length as u64);
        let mut buffer = vec![0; length + 3];
        client.get_into(&key, &mut buffer).await.expect("no error").expect("is there");
        assert!(buffer[..length] == bytes(length));
    }
    let again = client.put("k1", bytes(9), &PutOptions::default()).await.expect("no error");
    assert_eq!(again.outcome, PutOutcome::AlreadyExists);
    assert_eq!(fake.state().authorization.as_deref(), Some("Bearer secret"));
    assert_eq!(client.seen_index(), 5);
}

#[tokio::test]
async fn ranges_are_verified_and_bounded() {
    let (_fake, client) = connected().await;
    client.put("k", bytes(3_000_000), &PutOptions::default()).await.expect("stored");
    let range = client.get_range("k", 10, 2_000_000).await.expect("no error").expect("is there");
    assert!(range.value == bytes(3_000_000).slice(10..2_000_010));
    let mut buffer = [0; 100];
    client.get_range_into("k", 7, &mut buffer).await.expect("no error").expect("is there");
    assert!(buffer[..] == bytes(107)[7..]);
    let beyond = client.get_range("k", 2_999_999, 2).await.expect_err("one byte too far");
    assert_eq!((beyond.kind(), beyond.reason()), (ErrorKind::Invalid, "BAD_RANGE"));
    let small = client.get_into("k", &mut buffer).await.expect_err("the buffer is too small");
    assert!(matches!(small, Error::Buffer { length: 3_000_000, buffer: 100, .. }));
}

/// The answer to each item of a message, though nothing was done and a moment later there may be a leader.
#[tokio::test]
async fn a_batch_whose_items_find_no_leader_is_repeated_under_the_same_names() {
    let (fake, client) = connected().await;
    fake.state().item_refusals.extend(["NO_LEADER", "NO_LEADER"]);
    let items = ["a", "b"].map(|key| (key, bytes(10)));
    let stored = client.put_batch(&items, &PutOptions::default()).await.expect("no error");
    assert!(stored.iter().all(|outcome| matches!(outcome, Ok(PutOutcome::Stored))), "{stored:?}");
    let ids = fake.state().request_ids.clone();
    assert_eq!(ids.len(), 3);
    assert!(ids.iter().all(|id| (id.session, id.first) == (ids[0].session, ids[0].first)), "{ids:?}");
    fake.state().item_refusals.extend(["NO_LEADER"; 100]);
    let items = ["c", "d"].map(|key| (key, bytes(10)));
    let refused = client.put_batch(&items, &PutOptions::default()).await.expect("an outcome each");
    assert!(refused.iter().all(|outcome| outcome.as_ref().is_err_and(|error| error.reason() == "NO_LEADER")));
}

#[tokio::test]
async fn steps_follow_each_other_and_are_bounded() {
    let (_fake, client) = connected().await;
    client.put("k", bytes(3_000_000), &PutOptions::default()).await.expect("stored");
    let range = GetOptions { offset: 5, length: Some(2_500_000), ..GetOptions::default() };
    let mut received = Vec::new();
    let mut take = |at: u64, step: &[u8]| {
        assert_eq!(at, received.len() as u64);
        received.extend_from_slice(step);
    };
    client.get_steps("k", range.clone(), 2_500_000, &mut take).await.expect("no error").expect("is there");
    assert!(received == bytes(3_000_000)[5..2_500_005]);
    let mut never = |_: u64, _: &[u8]| panic!("nothing is given that has no room");
    let small = client.get_steps("k", range, 2_499_999, &mut never).await.expect_err("no room");
    assert!(matches!(small, Error::Buffer { length: 2_500_000, buffer: 2_499_999, .. }));
    assert!(client.get_steps("none", GetOptions::default(), 1, &mut never).await.expect("no error").is_none());
}

#[tokio::test]
async fn a_version_is_served_as_named_or_not_at_all() {
    let (_fake, client) = connected().await;
    client.put("k", bytes(10), &PutOptions::default()).await.expect("stored");
    let object = client.get("k").await.expect("no error").expect("is there");
    let named = |version: &str| GetOptions { version: version.to_owned(), ..GetOptions::default() };
    assert!(client.get_with("k", named(&object.info.version)).await.expect("no error").is_some());
    assert!(client.get_with("k", named("1.1.2")).await.expect("no error").is_none());
}

#[tokio::test]
async fn a_missing_object_is_an_outcome() {
    let (_fake, client) = connected().await;
    assert_eq!(client.get("none").await.expect("no error"), None);
    assert!(client.get_stream("none", GetOptions::default()).await.expect("no error").is_none());
    assert_eq!(client.exists("none").await.expect("no error"), Existence::Missing);
    assert_eq!(client.remove("none", false).await.expect("no error"), RemoveOutcome::Missing);
    let stat = client.stat("none").await.expect_err("an unknown tenant is an error");
    assert_eq!(stat.reason(), "UNKNOWN_TENANT");
}

#[tokio::test]
async fn bad_keys_do_not_leave_the_client() {
    let (fake, client) = connected().await;
    for (key, reason) in [(vec![], "KEY_EMPTY"), (vec![1; 1025], "KEY_TOO_LONG")] {
        let put = client.put(&key, Bytes::new(), &PutOptions::default()).await.expect_err("not a key");
        assert_eq!((put.kind(), put.reason()), (ErrorKind::Invalid, reason));
        assert_eq!(client.get(&key).await.expect_err("not a key").reason(), reason);
        assert_eq!(client.exists(&key).await.expect_err("not a key").reason(), reason);
    }
    assert!(fake.state().calls.is_empty());
}

#[tokio::test]
async fn a_flipped_bit_is_read_again_and_never_returned() {
    let (fake, client) = connected().await;
    client.put("k", bytes(100), &PutOptions::default()).await.expect("stored");
    fake.state().damaged_gets = 2;
    assert_eq!(client.get("k").await.expect("the third read is whole").expect("is there").value, bytes(100));
    fake.state().damaged_gets = u32::MAX;
    let error = client.get("k").await.expect_err("all reads are damaged");
    assert_eq!((error.kind(), error.reason()), (ErrorKind::Corrupt, "CHECKSUM_MISMATCH"));
}

/// A buffer that is handed back when the client has done with it.
struct Room {
    place: usize,
    bytes: Vec<u8>,
    back: std::sync::mpsc::Sender<(usize, Vec<u8>)>,
}

impl AsMut<[u8]> for Room {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.back.send((self.place, std::mem::take(&mut self.bytes))).expect("the test waits");
    }
}

#[tokio::test]
async fn each_object_of_a_batch_comes_to_its_place_or_says_why_not() {
    let (_fake, client) = connected().await;
    for length in [9, 0, 70_000] {
        client.put(format!("k{length}"), bytes(length), &PutOptions::default()).await.expect("stored");
    }
    let (back, rooms) = std::sync::mpsc::channel();
    let lengths = [9, 10, 70_001, 8, 1, 1];
    let room = |(place, length)| Room { place, bytes: vec![7; length], back: back.clone() };
    let items = ["k9", "k0", "k70000", "k9", "none", ""].into_iter().zip(lengths.into_iter().enumerate().map(room));
    let read = client.get_batch_into(items, true).await;
    let told = |read: &Result<Option<ObjectInfo>, Error>| match read {
        Ok(info) => Ok(info.as_ref().map(|info| info.length)),
        Err(error) => Err(error.reason().to_owned()),
    };
    let refused = |reason: &str| Err(reason.to_owned());
    let expected = [Ok(Some(9)), Ok(Some(0)), Ok(Some(70_000)), refused("BAD_RANGE"), Ok(None), refused("KEY_EMPTY")];
    assert_eq!(read.iter().map(told).collect::<Vec<_>>(), expected);
    let mut rooms: Vec<_> = rooms.try_iter().collect();
    rooms.sort_unstable();
    assert_eq!(rooms.len(), lengths.len(), "none is in use any more");
    assert!(rooms[0].1 == bytes(9) && rooms[1].1 == [7; 10]);
    assert!(rooms[2].1[..70_000] == bytes(70_000) && rooms[2].1[70_000] == 7);
}

#[tokio::test(start_paused = true)]
async fn a_batch_ends_by_one_deadline() {
    let (fake, client) = connected().await;
    fake.state().is_stuck = true;
    let began = tokio::time::Instant::now();
    let read = client.get_batch_into((0..40).map(|number| (format!("k{number}"), vec![0; 8])), false).await;
    assert!(read.len() == 40 && read.iter().all(Result::is_err));
    // Of a clock that goes only while everybody waits.
    assert!(began.elapsed() < client.settings().deadline * 2, "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_short_stream_is_an_error() {
    let (fake, client) = connected().await;
    client.put("k", bytes(100), &PutOptions::default()).await.expect("stored");
    fake.state().short_gets = true;
    let error = client.get("k").await.expect_err("one byte is missing");
    assert!(matches!(error, Error::LengthMismatch { expected: 100, actual: 99, .. }), "{error}");
}

#[tokio::test]
async fn calls_are_repeated_where_that_is_safe() {
    let (fake, client) = connected().await;
    let unavailable = || status(Code::Unavailable, "NO_LEADER", 0);
    client.put("opens a session", bytes(10), &PutOptions::default()).await.expect("stored");
    fake.state().calls.clear();
    fake.state().failures.extend([unavailable(), unavailable()]);
    client.put("k", bytes(10), &PutOptions::default()).await.expect("the third attempt succeeds");
    fake.state().failures.push_back(unavailable());
    let all = client.remove_matching(&Matching::All, false, |_| {}).await;
    assert_eq!(all.expect_err("is not repeated").reason(), "NO_LEADER");
    fake.state().failures.push_back(status(Code::ResourceExhausted, "OVERLOADED", 1));
    client.remove_matching(&Matching::All, false, |_| {}).await.expect("nothing was done before");
    fake.state().failures.push_back(status(Code::InvalidArgument, "VALUE_TOO_LARGE", 0));
    let refused = client.put("k", bytes(10), &PutOptions::default()).await.expect_err("is the answer");
    assert_eq!(refused.reason(), "VALUE_TOO_LARGE");
    assert_eq!(
        fake.state().calls,
        ["put", "put", "put", "remove_matching", "remove_matching", "remove_matching", "put"]
    );
}

#[tokio::test]
async fn a_removal_is_repeated_under_the_same_name() {
    let (fake, client) = connected().await;
    assert_eq!(client.remove("absent", false).await.expect("opens the session"), RemoveOutcome::Missing);
    client.put("k", bytes(10), &PutOptions::default()).await.expect("stored");
    fake.state().request_ids.remove(1);
    fake.state().failures.push_back(status(Code::Unavailable, "NO_LEADER", 0));
    assert_eq!(client.remove("k", false).await.expect("repeated"), RemoveOutcome::Removed);
    assert_eq!(fake.state().calls[..], ["open_session", "remove", "put", "remove", "remove"]);
    let ids = fake.state().request_ids.clone();
    assert_eq!((ids[0].first, ids[1].first), (1, 3));
    assert_eq!(ids[2], proto::RequestIds { again: true, ..ids[1] });

    let over = || status(Code::FailedPrecondition, "SESSION_EXPIRED", 0);
    fake.state().failures.extend([status(Code::Unavailable, "NO_LEADER", 0), over()]);
    assert_eq!(client.remove("k", false).await.expect_err("nobody knows").reason(), "SESSION_EXPIRED");
    assert_eq!(client.remove("k", false).await.expect("in a new session"), RemoveOutcome::Missing);
    let ids = fake.state().request_ids.clone();
    assert_ne!(ids[5].session, ids[4].session);
}

#[tokio::test]
async fn what_was_refused_at_once_because_the_session_is_over_is_named_anew() {
    let (fake, client) = connected().await;
    client.remove("opens the session", false).await.expect("nothing to remove");
    let over = || status(Code::FailedPrecondition, "SESSION_EXPIRED", 0);
    fake.state().failures.push_back(over());
    client.put("k", bytes(10), &PutOptions::default()).await.expect("nothing was done before");
    let items = [("a", bytes(1)), ("b", bytes(1))];
    fake.state().item_refusals.push_back("SESSION_EXPIRED");
    let outcomes = client.put_batch(&items, &PutOptions::default()).await.expect("nothing was done before");
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let ids = fake.state().request_ids.clone();
    let sessions: Vec<u64> = ids.iter().map(|ids| ids.session).collect();
    assert!(ids.iter().all(|ids| !ids.again) && sessions.len() == 5, "{ids:?}");
    assert!(sessions[1] == sessions[0] && sessions[2] == sessions[3] && sessions[4] != sessions[3], "{sessions:?}");
    fake.state().failures.extend([over(), over()]);
    let twice = client.put("k", bytes(10), &PutOptions::default()).await.expect_err("once is enough");
    assert_eq!(twice.reason(), "SESSION_EXPIRED");
}

#[tokio::test]
async fn a_put_ends_by_its_deadline_when_no_session_can_be_opened() {
    let fake = Fake::default();
    fake.state().is_stuck = true;
    let endpoint = fake.serve().await;
    let client =
        Client::builder().endpoint(endpoint).deadline(Duration::from_millis(200)).build().expect("legal settings");
    let options = PutOptions::default();
    let puts = ["a", "b", "c"].map(|key| client.put(key, bytes(10), &options));
    let all = tokio::time::timeout(Duration::from_millis(1000), futures::future::join_all(puts));
    for outcome in all.await.expect("nobody waits for another's time") {
        assert_eq!(outcome.expect_err("never answers").kind(), ErrorKind::Deadline);
    }
}

#[tokio::test]
async fn a_put_is_repeated_under_the_same_name_and_one_that_is_sent_once_has_none() {
    let (fake, client) = connected().await;
    client.remove("opens the session", false).await.expect("nothing to remove");
    fake.state().request_ids.clear();
    fake.state().failures.push_back(status(Code::Unavailable, "NO_LEADER", 0));
    let upsert = PutOptions { upsert: true, ..PutOptions::default() };
    client.put("k", bytes(10), &upsert).await.expect("repeated, though it replaces");
    let ids = fake.state().request_ids.clone();
    assert_eq!(ids[1], proto::RequestIds { again: true, ..ids[0] });

    let endpoint = fake.serve().await;
    let settings = ClientSettings { retries: 0, ..ClientSettings::default() };
    let once = Client::builder().endpoint(endpoint).settings(settings).build().expect("legal settings");
    once.put("k", bytes(10), &PutOptions::default()).await.expect("stored");
    assert_eq!(fake.state().request_ids.len(), 2);
}

#[tokio::test]
async fn the_deadline_ends_a_call_that_has_no_answer() {
    let fake = Fake::default();
    fake.state().is_stuck = true;
    let endpoint = fake.serve().await;
    let client =
        Client::builder().endpoint(endpoint).deadline(Duration::from_millis(50)).build().expect("legal settings");
    let error = client.get("k").await.expect_err("never answers");
    assert_eq!(error.kind(), ErrorKind::Deadline, "{error}");
    let source = futures::stream::pending();
    let error = client.put_stream("k", 5, source, &PutOptions::default()).await.expect_err("never answers");
    assert_eq!(error.kind(), ErrorKind::Deadline, "{error}");
}

#[tokio::test]
async fn an_unreachable_server_is_named_as_such() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = listener.local_addr().expect("is bound").to_string();
    drop(listener);
    let settings = ClientSettings { retries: 0, ..ClientSettings::default() };
    let connect = Client::builder().endpoint(endpoint).settings(settings).connect();
    let error = connect.await.expect_err("nobody listens");
    assert_eq!((error.kind(), error.reason()), (ErrorKind::Unavailable, "UNREACHABLE"));
    assert!(error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn a_second_server_takes_over() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let dead = listener.local_addr().expect("is bound").to_string();
    drop(listener);
    let fake = Fake::default();
    let client = Client::builder().endpoint(dead).endpoint(fake.serve().await).build().expect("legal settings");
    for _ in 0..4 {
        assert_eq!(client.exists("k").await.expect("one of them answers"), Existence::Missing);
    }
}

#[tokio::test]
async fn a_source_that_fails_stores_nothing() {
    let (fake, client) = connected().await;
    let parts = |parts: Vec<std::io::Result<Bytes>>| futures::stream::iter(parts);
    let options = PutOptions::default();
    let good = parts(vec![Ok(bytes(2_000_000)), Ok(bytes(5))]);
    client.put_stream("good", 2_000_005, good, &options).await.expect("stored");
    let short = client.put_stream("short", 5, parts(vec![Ok(bytes(4))]), &options).await;
    assert!(matches!(short, Err(Error::SourceLength { announced: 5, actual: 4 })), "{short:?}");
    let long = client.put_stream("long", 5, parts(vec![Ok(bytes(5)), Ok(bytes(1))]), &options).await;
    assert!(matches!(long, Err(Error::SourceLength { announced: 5, actual: 6 })), "{long:?}");
    let broken = parts(vec![Ok(bytes(5)), Err(std::io::Error::other("gone"))]);
    let broken = client.put_stream("broken", 5, broken, &options).await;
    assert!(matches!(broken, Err(Error::Source(_))), "{broken:?}");
    let more_than_nothing = client.put_stream("empty", 0, parts(vec![Ok(bytes(1))]), &options).await;
    assert!(matches!(more_than_nothing, Err(Error::SourceLength { announced: 0, actual: 1 })));
    let keys: Vec<Bytes> = fake.state().objects.keys().cloned().collect();
    assert_eq!(keys, ["good"]);
}

#[tokio::test]
async fn batches_answer_in_order() {
    let (_fake, client) = connected().await;
    let mut items: Vec<(String, Bytes)> = (0..50).map(|i| (format!("k{i}"), bytes(i * 10_000))).collect();
    items.insert(20, ("refused".into(), "refuse me".into()));
    items.insert(30, ("large".into(), bytes(6_000_000)));
    let outcomes = client.put_batch(&items, &PutOptions::default()).await.expect("one outcome an item");
    assert_eq!(outcomes.len(), items.len());
    assert_eq!(outcomes[20].as_ref().map_err(Error::reason), Err("NO_SPACE"));
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_err()).count(), 1);
    let keys: Vec<&str> = items.iter().map(|(key, _)| key.as_str()).collect();
    for ((_, value), got) in items.iter().zip(client.get_batch(&keys).await.expect("one outcome a key")) {
        match got {
            BatchGot::Found(found) => assert!(found.value == value),
            other => assert!(value == "refuse me" && matches!(other, BatchGot::Missing)),
        }
    }
}

#[tokio::test]
async fn removal_by_pattern_reports_progress() {
    let (_fake, client) = connected().await;
    let mut steps = Vec::new();
    let total = client.remove_matching(&Matching::All, false, |step| steps.push(step.removed)).await;
    assert_eq!(steps, [3, 5]);
    assert_eq!(total.expect("is done").removed, 5);
}

#[tokio::test]
async fn answers_that_break_the_protocol_are_errors() {
    let (fake, client) = connected().await;
    assert!(matches!(client.pin(&["k"]).await, Err(Error::Protocol { operation: "pin", .. })));
    fake.state().failures.push_back(Status::internal("bug"));
    assert_eq!(client.exists("k").await.expect_err("is an error").kind(), ErrorKind::Internal);
}

/// A task whose answer was lost was begun a second time, under another name.
#[tokio::test]
async fn a_task_that_is_begun_again_has_the_same_name() {
    let (fake, client) = connected().await;
    fake.state().failures.push_back(status(Code::Unavailable, "NO_LEADER", 0));
    let task = client.begin_copy("k", &["node".to_owned()]).await.expect("begun");
    assert_eq!((task.kind, task.state), (TaskKind::Copy, TaskState::Waiting));
    assert_eq!(fake.state().tasks, [task.id, task.id]);
    assert_eq!(client.task(task.id).await.expect("no error"), None);
    let other = client.begin_move("k", "one", "two").await.expect("begun");
    assert_ne!(other.id, task.id);
}
