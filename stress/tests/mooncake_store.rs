//! The crate with the names of `mooncake_store`, against a running node, as a Rust program that was written for that store calls
//! it.
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(unsafe_code, reason = "the crate's calls take addresses")]

use std::ffi::c_void;

use mooncake_store::{MooncakeStore, ReplicateConfig, SoftPinAction, StoreError};
use tidepool_stress::node_process::{NodeOptions, NodeProcess, Place, program_beside};

const BLOCK: usize = 300_000;

struct World {
    node: NodeProcess,
    store: MooncakeStore,
    folders: [tempfile::TempDir; 2],
}

fn start() -> World {
    let (folder, segment) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let node = NodeProcess::start(NodeOptions {
        program: program_beside(&std::env::current_exe().unwrap()).expect("the tidepool binary is built"),
        data: folder.path().join("data"),
        dram_bytes: 64 << 20,
        nvme_bytes: 0,
        settings: vec![format!("dram.folder='{}'", segment.path().display()), "store.slice_bytes=256KiB".into()],
        place: Place::default(),
    });
    let (node, store) = (node.unwrap(), MooncakeStore::new().unwrap());
    set_up(&store, &node.grpc.to_string()).unwrap();
    World { node, store, folders: [folder, segment] }
}

fn set_up(store: &MooncakeStore, master: &str) -> Result<(), StoreError> {
    store.setup("here", "http://127.0.0.1:8080/metadata", 512 << 20, 128 << 20, "tcp", "", master)
}

fn block(seed: usize) -> Vec<u8> {
    (0..BLOCK).map(|index| ((index + seed) * 7 % 251) as u8).collect()
}

fn failed(code: i32) -> StoreError {
    StoreError::OperationFailed(code)
}

#[test]
fn values_go_in_and_out_and_what_is_wrong_has_the_other_crates_code() {
    let World { node: _node, store, folders: _folders } = start();
    set_up(&store, "nowhere:1").expect("a second call changes nothing");
    store.health_check().unwrap();
    assert_eq!(store.get_hostname().unwrap(), "here");
    let value = block(1);
    store.put("k", &value, None).unwrap();
    store.put("k", b"another", None).expect("a key that has a value keeps it");
    assert_eq!(store.get("k").unwrap(), value);
    assert_eq!(store.get_size("k"), Ok(BLOCK as i64));
    assert_eq!((store.is_exist("k"), store.is_exist("l")), (Ok(true), Ok(false)));
    assert_eq!(store.batch_is_exist(&["l", "k"]), Ok(vec![false, true]));
    assert_eq!(store.remove("k", false), Err(failed(-706)), "it was found to exist a moment ago");
    assert_eq!(store.remove("k", true), Ok(()));
    assert_eq!([store.remove("k", true), store.remove("k", false)], [Err(failed(-704)), Err(failed(-704))]);
    assert_eq!((store.get("k"), store.get_size("k")), (Err(failed(-704)), Err(failed(-704))));
    assert_eq!(store.put("k", b"", None), Err(failed(-600)));
    assert!(matches!(store.put("a\0b", b"v", None), Err(StoreError::InvalidString(_))));
    assert_eq!(store.put("", b"v", None), Err(failed(-600)));

    let config = ReplicateConfig { replica_num: 2, with_hard_pin: true, ..ReplicateConfig::default() };
    store.put("pinned", b"v", Some(&config)).expect("as many copies as can be had");
    let wrong = ReplicateConfig { soft_pin_ttl_ms: Some(5), ..ReplicateConfig::default() };
    assert_eq!(store.put("soft", b"v", Some(&wrong)), Err(failed(-600)));
    let soft = ReplicateConfig { soft_pin_action: SoftPinAction::Enable, ..wrong };
    store.put("soft", b"v", Some(&soft)).unwrap();
    assert_eq!(store.remove_by_regex("(", false), Err(failed(-600)));
    assert_eq!(store.remove_by_regex("^so", false), Ok(1));
    assert_eq!(store.remove_all(false), Ok(1));
}

#[test]
fn blocks_go_in_and_out_by_address_one_by_one_and_many_at_a_time() {
    let World { node: _node, store, folders: _folders } = start();
    let (mut source, mut target) = (Vec::new(), vec![0_u8; 3 * BLOCK]);
    (0..3).for_each(|number| source.extend(block(number)));
    let places = |memory: &mut [u8]| -> Vec<*mut c_void> {
        memory.chunks_mut(BLOCK).map(|chunk| chunk.as_mut_ptr().cast()).collect()
    };
    let (from, to) = (places(&mut source), places(&mut target));
    // SAFETY: the vectors live to the end of the test, and nobody else uses them during the calls.
    unsafe {
        store.register_buffer(from[0], 2 * BLOCK).unwrap();
        assert_eq!(store.register_buffer(from[1], 10), Err(failed(-600)), "it overlaps");
        // The third one is not registered.
        assert_eq!(store.batch_put_from(&["a", "b", "c"], &from, &[BLOCK; 3], None), Ok(vec![0; 3]));
        let null = std::ptr::null_mut();
        let codes = store.batch_put_from(&["a", "d", "e"], &[from[0], null, from[1]], &[BLOCK, BLOCK, 0], None);
        assert_eq!(codes, Ok(vec![0, -600, -600]), "each has its own");
        store.put_from("one", from[1], BLOCK, None).unwrap();
        assert_eq!(store.unregister_buffer(from[0]), Ok(()));
        assert_eq!(store.unregister_buffer(from[0]), Err(failed(-600)));

        let read = store.batch_get_into(&["c", "none", "b"], &to, &[BLOCK; 3]);
        assert_eq!(read, Ok(vec![BLOCK as i64, -704, BLOCK as i64]));
        assert_eq!(store.get_into("one", to[1], BLOCK), Ok(BLOCK as i64));
        assert_eq!(store.get_into("one", to[1], BLOCK - 1), Err(failed(-600)), "it does not fit");
        assert_eq!(store.get_into("one", to[1], BLOCK), Ok(BLOCK as i64));
        assert_eq!(store.get_into("none", to[1], BLOCK), Err(failed(-704)));
        let uneven = store.batch_get_into(&["a"], &to, &[BLOCK]);
        assert!(matches!(uneven, Err(StoreError::InvalidArgument(_))));
        assert_eq!(store.batch_put_from(&[], &[], &[], None), Ok(Vec::new()));
    }
    assert!(target[..BLOCK] == block(2) && target[BLOCK..2 * BLOCK] == block(1) && target[2 * BLOCK..] == block(1));
}

#[test]
fn calls_before_setup_and_to_a_node_that_is_gone_fail_by_code() {
    let store = MooncakeStore::new().unwrap();
    assert_eq!(store.put("k", b"v", None), Err(failed(-600)));
    assert_eq!(
        (store.get("k"), store.is_exist("k"), store.health_check()),
        (Err(failed(-600)), Err(failed(-600)), Err(failed(1)))
    );
    assert_eq!(set_up(&store, "etcd://127.0.0.1:2379"), Err(failed(-1012)));
    let no_such = store.setup("here", "", 0, 0, "rdma", "mlx5_0", "127.0.0.1:1");
    assert_eq!(no_such, Err(failed(-600)), "no rdma, and nobody allowed another way");

    let World { mut node, store, folders: _folders } = start();
    store.put("k", b"v", None).unwrap();
    node.kill().unwrap();
    let error = store.put("l", b"v", None).unwrap_err();
    assert!([failed(-900), failed(-901)].contains(&error), "{error}");
    assert_eq!(store.health_check(), Err(failed(2)));
}

/// As a program of many tasks does it, whose runtime is not this crate's.
#[test]
fn tasks_of_any_runtime_call_it() {
    let World { node: _node, store, folders: _folders } = start();
    let store = std::sync::Arc::new(store);
    let mut current = tokio::runtime::Builder::new_current_thread();
    let mut several = tokio::runtime::Builder::new_multi_thread();
    for runtime in [current.enable_all().build().unwrap(), several.worker_threads(2).enable_all().build().unwrap()] {
        runtime.block_on(async {
            let tasks = (0..8).map(|number| {
                let store = std::sync::Arc::clone(&store);
                tokio::spawn(async move {
                    let (key, value) = (format!("k{number}"), block(number));
                    store.put(&key, &value, None).unwrap();
                    assert!(store.get(&key).unwrap() == value);
                })
            });
            for task in tasks.collect::<Vec<_>>() {
                task.await.unwrap();
            }
        });
    }
    assert_eq!(store.remove_all(true), Ok(8));
}
