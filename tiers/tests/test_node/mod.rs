//! A node's tiers in temporary folders, with a catalog that answers as it is told.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::allow_attributes, reason = "what is unused differs per test file, so an expectation can't hold")]

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, TenantId, TierKind, VersionId};
use tidepool_tiers::io::faulty::FaultyDisk;
use tidepool_tiers::memory::{MemoryConfig, MemoryTier};
use tidepool_tiers::nvme::{NvmeConfig, NvmeError, NvmeTier, WritePolicy};
use tidepool_tiers::store::{Forget, ForgetAnswer, ReplicaIdentity, ReplicaName, TierReport};
use tidepool_tiers::{StoreConfig, StoreError, TieredStore};

/// How the catalog answers.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(crate) enum Answers {
    Allow,
    Refuse,
    Silence,
}

#[derive(Default)]
pub(crate) struct ScriptedForget {
    answers: AtomicU8,
    pub(crate) asked: AtomicU64,
    /// Of these further ones.
    pub(crate) asked_further: AtomicU64,
    /// Refused whatever is said of others: they are leased.
    pub(crate) leased: Mutex<Vec<ReplicaName>>,
    /// Replicas that were told to be gone.
    pub(crate) lost: AtomicU64,
}

impl ScriptedForget {
    pub(crate) fn answer(&self, answers: Answers) {
        self.answers.store(answers as u8, Ordering::SeqCst);
    }
}

impl Forget for ScriptedForget {
    fn forget(&self, replicas: Vec<ReplicaName>) -> BoxFuture<'_, Vec<ForgetAnswer>> {
        self.asked.fetch_add(replicas.len() as u64, Ordering::SeqCst);
        let answer = match self.answers.load(Ordering::SeqCst) {
            0 => ForgetAnswer::Forgotten,
            1 => ForgetAnswer::Refused,
            _ => ForgetAnswer::Unanswered,
        };
        let leased = self.leased.lock().unwrap();
        let answer = |name| if leased.contains(name) { ForgetAnswer::Refused } else { answer };
        let answers = replicas.iter().map(answer).collect();
        async move { answers }.boxed()
    }

    fn forget_further(&self, replicas: Vec<ReplicaName>) -> BoxFuture<'_, Vec<ForgetAnswer>> {
        self.asked_further.fetch_add(replicas.len() as u64, Ordering::SeqCst);
        self.forget(replicas)
    }

    fn lost(&self, replicas: Vec<ReplicaName>) -> BoxFuture<'_, bool> {
        let hears = self.answers.load(Ordering::SeqCst) != Answers::Silence as u8;
        self.lost.fetch_add(if hears { replicas.len() as u64 } else { 0 }, Ordering::SeqCst);
        async move { hears }.boxed()
    }
}

/// Bytes that follow from a number, different everywhere.
pub(crate) fn payload(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

pub(crate) fn key(sequence: u64) -> ObjectKey {
    ObjectKey::new(format!("object/{sequence}").as_bytes()).unwrap()
}

pub(crate) struct TestNode {
    pub(crate) store: TieredStore,
    pub(crate) forget: Arc<ScriptedForget>,
    config: StoreConfig,
    memory: MemoryConfig,
    nvme: Option<NvmeConfig>,
    /// The NVMe tier lies on it, rather than in a folder.
    disk: Option<FaultyDisk>,
    sequence: AtomicU64,
    folder: tempfile::TempDir,
    segment: SegmentFile,
}

const NODE: NodeId = NodeId(7);

impl TestNode {
    pub(crate) fn config() -> StoreConfig {
        StoreConfig {
            slice_bytes: 256 << 10,
            promote_after_reads: 2,
            scrub_bytes_per_second: 0,
            watermark_high: 0.90,
            watermark_low: 0.80,
            ..StoreConfig::default()
        }
    }

    pub(crate) async fn new(dram: u64, nvme: Option<u64>) -> Self {
        Self::with(Self::config(), dram, nvme).await
    }

    pub(crate) async fn with(config: StoreConfig, dram: u64, nvme: Option<u64>) -> Self {
        Self::built(config, dram, nvme, None).await
    }

    /// On a disk that fails as it is told.
    pub(crate) async fn on(disk: &FaultyDisk, config: StoreConfig, dram: u64, nvme: u64) -> Self {
        Self::built(config, dram, Some(nvme), Some(disk.clone())).await
    }

    async fn built(config: StoreConfig, dram: u64, nvme: Option<u64>, disk: Option<FaultyDisk>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().file_name().unwrap().to_string_lossy().into_owned();
        let memory = MemoryConfig {
            folder: Some(PathBuf::from("/dev/shm")),
            name: format!("tidepool-test-{name}"),
            owner: None,
            capacity_bytes: dram,
            survive_restart: true,
            node: NODE,
            incarnation: Incarnation(1),
        };
        let nvme = nvme.map(|capacity| NvmeConfig {
            region_bytes: 1 << 20,
            ..NvmeConfig::new(folder.path().join("nvme"), capacity)
        });
        let config = StoreConfig { heat_file: Some(folder.path().join("heat")), ..config };
        let forget = Arc::new(ScriptedForget::default());
        let store = Self::open(&config, &memory, nvme.as_ref(), disk.as_ref(), &forget).await;
        let segment = SegmentFile(segment_path(&memory));
        Self { store, forget, config, memory, nvme, disk, sequence: AtomicU64::new(1), folder, segment }
    }

    async fn open(
        config: &StoreConfig,
        memory: &MemoryConfig,
        nvme: Option<&NvmeConfig>,
        disk: Option<&FaultyDisk>,
        forget: &Arc<ScriptedForget>,
    ) -> TieredStore {
        let (memory, recovered) = MemoryTier::open(memory).unwrap();
        let nvme = match nvme {
            Some(config) => Some((open_nvme(config, disk).await, WritePolicy::OnEvict)),
            None => None,
        };
        let forget: Arc<dyn Forget> = Arc::clone(forget) as Arc<dyn Forget>;
        let store = TieredStore::start(config.clone(), memory, recovered, nvme, forget);
        store.recover().await.unwrap();
        store
    }

    pub(crate) fn identity(&self, sequence: u64) -> ReplicaIdentity {
        let (node, incarnation) = (NODE, Incarnation(1));
        let version = VersionId { node, incarnation, sequence };
        let replica = ReplicaId { node, incarnation, sequence };
        let name = ReplicaName { tenant: TenantId::DEFAULT, key: key(sequence), version, replica };
        ReplicaIdentity { name, data_type: DataType::KvCache }
    }

    /// Puts an object of `length` bytes that follow from its sequence.
    pub(crate) async fn put(&self, length: usize) -> ReplicaName {
        self.try_put(length).await.unwrap()
    }

    pub(crate) async fn try_put(&self, length: usize) -> Result<ReplicaName, StoreError> {
        let name = self.try_seal(length).await?;
        assert!(self.store.complete(&name, name.version.sequence));
        Ok(name)
    }

    /// Puts an object with a soft pin.
    pub(crate) async fn put_pinned(&self, length: usize, duration: Duration) -> ReplicaName {
        let name = self.seal_only(length).await;
        assert_eq!(self.store.soft_pin(&name, Some(duration)), duration);
        assert!(self.store.complete(&name, name.version.sequence));
        name
    }

    pub(crate) async fn seal_only(&self, length: usize) -> ReplicaName {
        self.try_seal(length).await.unwrap()
    }

    async fn try_seal(&self, length: usize) -> Result<ReplicaName, StoreError> {
        let sequence = self.sequence.fetch_add(1, Ordering::SeqCst);
        self.try_seal_as(self.identity(sequence), length).await
    }

    async fn try_seal_as(&self, identity: ReplicaIdentity, length: usize) -> Result<ReplicaName, StoreError> {
        let mut buffer = self.store.reserve(length as u64, 10).await?;
        let bytes = payload(identity.name.version.sequence, length);
        bytes.chunks(100_000).for_each(|piece| buffer.write(piece).unwrap());
        Ok(buffer.seal(identity, Some(crc32fast::hash(&bytes)))?.name)
    }

    /// Puts another version of the key of `old`, beside it.
    pub(crate) async fn put_again(&self, old: &ReplicaName, length: usize) -> ReplicaName {
        let name = self.seal_again(old, length).await;
        assert!(self.store.complete(&name, name.version.sequence));
        name
    }

    pub(crate) async fn seal_again(&self, old: &ReplicaName, length: usize) -> ReplicaName {
        let mut identity = self.identity(self.sequence.fetch_add(1, Ordering::SeqCst));
        identity.name.key = old.key.clone();
        self.try_seal_as(identity, length).await.unwrap()
    }

    pub(crate) async fn put_many(&self, count: usize, length: usize) -> Vec<ReplicaName> {
        let mut names = Vec::new();
        for _ in 0..count {
            names.push(self.put(length).await);
        }
        names
    }

    /// Reads a whole object and says from which tier; `None` if it is not there.
    pub(crate) async fn try_read(&self, name: &ReplicaName) -> Result<Option<(Vec<u8>, TierKind)>, StoreError> {
        let Some(mut reader) = self.store.open(name.tenant, &name.key, name.version).await? else { return Ok(None) };
        let tier = reader.tier();
        let mut all = Vec::new();
        while let Some(bytes) = reader.next().await? {
            all.extend_from_slice(&bytes);
        }
        Ok(Some((all, tier)))
    }

    /// Reads an object of `length` bytes that must be there, whole; answers from which tier.
    pub(crate) async fn assert_right(&self, name: &ReplicaName, length: usize) -> TierKind {
        let (bytes, tier) = self.try_read(name).await.unwrap().expect("object is there");
        assert!(bytes == payload(name.version.sequence, length), "wrong bytes of {}", name.key);
        tier
    }

    /// Drives everything out of DRAM by asking for all of it.
    pub(crate) async fn demote_all(&self) {
        let Err(StoreError::TooLarge { largest, .. }) = self.store.reserve(u64::MAX, 10).await else {
            panic!("nothing has room for so much");
        };
        drop(self.store.reserve(largest, 10).await.unwrap());
        self.until(|node| node.tiers_of(TierKind::Dram).objects == 0).await;
    }

    pub(crate) fn tiers(&self) -> [TierReport; 2] {
        [self.tiers_of(TierKind::Dram), self.tiers_of(TierKind::Nvme)]
    }

    pub(crate) fn tiers_of(&self, tier: TierKind) -> TierReport {
        self.store.tiers_report().into_iter().find(|report| report.tier == tier).unwrap()
    }

    pub(crate) fn dram(&self) -> TierReport {
        self.tiers_of(TierKind::Dram)
    }

    pub(crate) fn assert_accounts(&self) {
        for tier in self.store.tiers_report() {
            assert_eq!(tier.free + tier.used + tier.reserved, tier.capacity, "{tier:?}");
        }
    }

    pub(crate) fn assert_empty(&self) {
        self.assert_accounts();
        assert_eq!((self.dram().used, self.dram().reserved, self.store.len()), (0, 0, 0));
    }

    /// Waits until something holds; fails after 10 seconds.
    pub(crate) async fn until(&self, holds: impl Fn(&Self) -> bool) {
        let waiting = async {
            while !holds(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("it holds within 10 seconds");
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let path = self.nvme.as_ref().unwrap().path.join("regions.dat");
        path.metadata().unwrap().blocks() * 512
    }

    /// Attaches the NVMe tier again; answers how many records were taken over.
    pub(crate) async fn attach(&self) -> u64 {
        self.attach_on(self.disk.as_ref()).await
    }

    /// Opens what is on that disk, to be attached.
    pub(crate) async fn open_tier(&self, disk: &FaultyDisk) -> Arc<NvmeTier> {
        open_nvme(self.nvme.as_ref().unwrap(), Some(disk)).await
    }

    /// Attaches what is on that disk.
    pub(crate) async fn attach_on(&self, disk: Option<&FaultyDisk>) -> u64 {
        let tier = open_nvme(self.nvme.as_ref().unwrap(), disk).await;
        self.store.attach_nvme(tier, WritePolicy::OnEvict).await.unwrap()
    }

    pub(crate) async fn stop_and_restart(self) -> Self {
        self.store.shutdown().await.unwrap();
        self.reopen(|_| {}).await
    }

    /// As [`Self::stop_and_restart`], with another heat list.
    pub(crate) async fn stop_and_restart_with_heat(self, list: &[u8]) -> Self {
        self.store.shutdown().await.unwrap();
        let path = self.folder.path().join("heat");
        self.reopen(|()| std::fs::write(path, list).unwrap()).await
    }

    pub(crate) fn heat_list(&self) -> Vec<u8> {
        std::fs::read(self.folder.path().join("heat")).unwrap()
    }

    /// Starts anew on segment and data file as they are at this instant, as after a kill: what the clean stop, which
    /// is only there to let go of locks and threads, writes afterwards is thrown away.
    pub(crate) async fn kill_and_restart(self) -> Self {
        let mut files = vec![segment_path(&self.memory)];
        files.extend(self.nvme.as_ref().map(|nvme| nvme.path.join("regions.dat")));
        let copies: Vec<(PathBuf, PathBuf)> =
            files.into_iter().map(|path| (path.with_extension("copy"), path)).collect();
        for (copy, path) in &copies {
            std::fs::copy(path, copy).unwrap();
        }
        self.store.shutdown().await.unwrap();
        self.reopen(|()| copies.iter().for_each(|(copy, path)| std::fs::rename(copy, path).unwrap())).await
    }

    async fn reopen(self, between: impl FnOnce(())) -> Self {
        let Self { store, forget, config, memory, nvme, disk, sequence, folder, segment } = self;
        drop(store);
        between(());
        let store = Self::open(&config, &memory, nvme.as_ref(), disk.as_ref(), &forget).await;
        Self { store, forget, config, memory, nvme, disk, sequence, folder, segment }
    }

    /// Flips one bit in the middle of the payload of the first slice of `name` in the data file.
    pub(crate) fn flip_a_payload_bit(&self, name: &ReplicaName) {
        let path = self.nvme.as_ref().unwrap().path.join("regions.dat");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let image = std::fs::read(&path).unwrap();
        let needle = &payload(name.version.sequence, 1 << 20)[1000..1064];
        let at = image.windows(needle.len()).position(|window| window == needle).expect("payload is on disk");
        file.write_all_at(&[image[at] ^ 0x10], at as u64).unwrap();
        file.sync_all().unwrap();
    }
}

/// Opens the tier; whoever still reads from its last life is waited for.
async fn open_nvme(config: &NvmeConfig, disk: Option<&FaultyDisk>) -> Arc<NvmeTier> {
    if let Some(disk) = disk {
        return NvmeTier::open_on(config, NODE, Arc::new(disk.clone())).unwrap();
    }
    for _ in 0..1000 {
        match NvmeTier::open(config.clone(), NODE) {
            Err(NvmeError::Locked { .. }) => tokio::time::sleep(Duration::from_millis(5)).await,
            opened => return opened.unwrap(),
        }
    }
    panic!("the tier of the last life is never let go of");
}

fn segment_path(memory: &MemoryConfig) -> PathBuf {
    memory.folder.as_ref().unwrap().join(&memory.name)
}

/// Removes the segment at the end of a test.
pub(crate) struct SegmentFile(PathBuf);

impl Drop for SegmentFile {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}
