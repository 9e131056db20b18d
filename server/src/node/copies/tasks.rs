//! Carries out the copies and moves that somebody asked for ([`tidepool_metadata::catalog::TaskRequest`]).
//!
//! Whoever leads does: it has the targets pull their copies from a node that has one, and asks the catalog whether that was all.
//! It keeps nothing but when to try again, so that another leader goes on where this one ended; two that do the same for a moment
//! do no harm, because every step is a compare-and-set of the catalog's. All tasks together give away no more bytes a second than
//! repair may of one node.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use prost::Message as _;
use tidepool_metadata::NodeId;
use tidepool_metadata::catalog::{
    Answer, Command, Located, MAX_OPEN_TASKS, NodeStat, Query, TaskFailure, TaskId, TaskPage, TaskRequest, TaskStat,
    TaskState, TaskStep,
};
use tidepool_replication::replicas::task::{Step, plan};
use tidepool_replication::{CatalogError, CatalogHandle, Read, Role};
use tidepool_tiers::store::ReplicaName;
use tokio::time::Instant;

use super::repair::{RepairConfig, awaited, pull_of};
use super::{malformed, patience};
use crate::node::{NodeService, PROPOSE_TIMEOUT};
use crate::peers::wire::{NodeReply, NodeRequest, Pull, Pulls, Refused, node_reply, node_request};

/// How often tasks are looked for.
const PERIOD: Duration = Duration::from_millis(100);
/// How often all of them are, whether or not there is room for another one: what they are about may be gone.
const SURVEY_PERIOD: Duration = Duration::from_secs(1);
/// How long a task rests that could not be done, and how much longer at most after several failures: so that those which come of one
/// death are not many.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
const MOST_RESTS: u32 = 3;
/// Tasks that are looked at between two surveys.
const GLANCE: usize = 64;
/// Tasks that are carried out at a time.
const AT_A_TIME: usize = 4;

/// Runs until the catalog stops.
pub(in crate::node) async fn run(service: NodeService, catalog: CatalogHandle, config: RepairConfig) {
    let mut allowance = Allowance { bytes_per_second: config.bytes_per_second, next: Instant::now() };
    let mut period = tokio::time::interval(PERIOD);
    let mut absent: HashMap<NodeId, Instant> = HashMap::new();
    let mut resting: HashMap<TaskId, Instant> = HashMap::new();
    let (mut under_way, mut pulling) = (HashSet::new(), 0);
    let mut attempts = FuturesUnordered::new();
    let mut survey_at = Instant::now();
    loop {
        tokio::select! {
            _ = period.tick() => {}
            Some((id, has_pulled, rest)) = attempts.next() => {
                under_way.remove(&id);
                pulling -= usize::from(has_pulled);
                resting.insert(id, Instant::now() + rest);
            }
        }
        let (status, now) = (catalog.status(), Instant::now());
        if status.failure.is_some() {
            return;
        }
        let is_survey = now >= survey_at;
        if status.role != Role::Leader || !(is_survey || pulling < AT_A_TIME && allowance.is_free(now)) {
            continue;
        }
        let query = Query::OpenTasks { limit: if is_survey { MAX_OPEN_TASKS } else { GLANCE } };
        let Ok((_, Answer::Tasks(TaskPage { tasks, .. }))) = catalog.query(query, Read::Local).await else { continue };
        resting.retain(|_, until| *until > now);
        if is_survey {
            survey_at = now + SURVEY_PERIOD;
        }
        if tasks.is_empty() {
            continue;
        }
        let Ok(nodes) = service.nodes().await else { continue };
        let awaited = awaited(&nodes, &mut absent, config.grace);
        for task in tasks {
            let id = task.request.task;
            if resting.contains_key(&id) || under_way.contains(&id) {
                continue;
            }
            let Ok(work) = Work::of(&task, &catalog, &nodes, &awaited).await else { break };
            let has_pulled = matches!(work, Work::Pull(_));
            match &work {
                Work::Wait => {
                    resting.insert(id, now + AGAIN_AFTER);
                    continue;
                }
                Work::Pull(pulls) => {
                    let bytes = task.length.saturating_mul(pulls.len() as u64);
                    if pulling == AT_A_TIME || !allowance.take(now, bytes) {
                        continue;
                    }
                    pulling += 1;
                }
                Work::Note(_) => {}
            }
            under_way.insert(id);
            let rest = AGAIN_AFTER * (1 + u32::from(task.failures)).min(MOST_RESTS);
            let attempt = Attempt { service: &service, catalog: &catalog, task };
            attempts.push(async move {
                if let Err(error) = attempt.run(work).await {
                    tracing::debug!(task = id.0, %error, "a task is tried again");
                }
                (id, has_pulled, rest)
            });
        }
    }
}

/// Spreads bytes over time.
struct Allowance {
    /// 0: as fast as it goes.
    bytes_per_second: u64,
    /// When the next bytes may go.
    next: Instant,
}

impl Allowance {
    fn is_free(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// Whether so many bytes may go now.
    fn take(&mut self, now: Instant, bytes: u64) -> bool {
        let is_free = self.is_free(now);
        if is_free && self.bytes_per_second > 0 {
            self.next = now + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        }
        is_free
    }
}

/// What is to be done for a task.
enum Work {
    Wait,
    Note(TaskStep),
    /// By each of these nodes.
    Pull(Vec<(NodeId, Pull)>),
}

impl Work {
    async fn of(
        task: &TaskStat,
        catalog: &CatalogHandle,
        nodes: &[NodeStat],
        awaited: &[NodeId],
    ) -> Result<Self, CatalogError> {
        let TaskRequest { tenant, key, .. } = &task.request;
        let (_, located) = catalog.locate(*tenant, vec![key.clone()], None, Read::Local).await?;
        let location = match located.into_iter().next() {
            Some(Located::Found(location)) if location.version == task.version => Some(location),
            _ => None,
        };
        Ok(match (plan(&task.request, location.as_deref(), nodes, awaited), location) {
            (Step::Settle, _) => Self::Note(TaskStep::Settle),
            (Step::Fail(failure), _) => Self::Note(TaskStep::Fail(failure)),
            (Step::Pull { source, targets }, Some(location)) => {
                // Which copy is read does not matter: a pull names the version.
                let replica = location.replicas[0].replica;
                let name = ReplicaName { tenant: *tenant, key: key.clone(), version: task.version, replica };
                let pull = pull_of(&name, &location, source);
                Self::Pull(targets.into_iter().map(|target| (target, pull.clone())).collect())
            }
            (Step::Wait | Step::Pull { .. }, _) => Self::Wait,
        })
    }
}

/// One task, once.
struct Attempt<'a> {
    service: &'a NodeService,
    catalog: &'a CatalogHandle,
    task: TaskStat,
}

impl Attempt<'_> {
    async fn run(self, work: Work) -> Result<(), CatalogError> {
        match work {
            Work::Wait => Ok(()),
            Work::Note(step) => self.note(step).await,
            Work::Pull(pulls) => {
                if self.task.state == TaskState::Waiting {
                    self.note(TaskStep::Start).await?;
                }
                let pulls = pulls.into_iter().map(|(target, pull)| self.pull_at(target, pull));
                let failures = futures::future::join_all(pulls).await;
                self.note(failures.into_iter().flatten().next().map_or(TaskStep::Settle, TaskStep::Fail)).await
            }
        }
    }

    /// Why a node has not got its copy, if it says so. One that does not answer may have it, or will be absent.
    async fn pull_at(&self, target: NodeId, pull: Pull) -> Option<TaskFailure> {
        let within = patience(pull.length);
        let ask = node_request::Ask::Pulls(Pulls { pulls: vec![pull], at_a_time: 1, further: false });
        let answer = if target == self.service.inner.node {
            let words = NodeRequest { ask: Some(ask) }.encode_to_vec();
            let answer = tokio::time::timeout(within, self.service.answer_node(&words)).await.ok()?;
            NodeReply::decode(&answer[..]).map_err(|_| malformed())
        } else {
            self.service.ask_node(target, ask, within).await
        };
        let refused = match answer.map(|reply| reply.answer) {
            Ok(Some(node_reply::Answer::Each(each))) => match each.replies.into_iter().next()?.answer? {
                node_reply::Answer::Refused(refused) => refused,
                _ => return None,
            },
            Ok(Some(node_reply::Answer::Refused(refused))) => refused,
            Ok(_) => return None,
            Err(error) => {
                tracing::debug!(%target, %error, "a copy of a task has no answer");
                return None;
            }
        };
        let (id, Refused { reason, message }) = (self.task.request.task.0, refused);
        tracing::info!(task = id, %target, reason, message, "a copy of a task could not be made");
        match &*reason {
            // Another one brought it there, or just does.
            "HAS_COPY" => None,
            "NO_SPACE" => Some(TaskFailure::NoSpace),
            "QUOTA_EXCEEDED" => Some(TaskFailure::QuotaExceeded),
            _ => Some(TaskFailure::NotCopied),
        }
    }

    async fn note(&self, step: TaskStep) -> Result<(), CatalogError> {
        let command = Command::StepTask { task: self.task.request.task, step };
        let noted = tokio::time::timeout(PROPOSE_TIMEOUT, self.catalog.propose(command)).await;
        noted.unwrap_or(Err(CatalogError::OutcomeUnknown)).map(drop)
    }
}
