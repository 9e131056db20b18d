//! Copies and moves that somebody asked for.

use super::*;

pub(super) fn copy(task: u64, name: &str, targets: &[u32]) -> TaskRequest {
    TaskRequest {
        task: TaskId(task),
        kind: TaskKind::Copy,
        tenant: TENANT,
        key: key(name),
        source: None,
        targets: targets.iter().copied().map(NodeId).collect(),
    }
}

fn moving(task: u64, name: &str, source: u32, target: u32) -> TaskRequest {
    TaskRequest { kind: TaskKind::Move, source: Some(NodeId(source)), ..copy(task, name, &[target]) }
}

const WAITING: TaskOutcome = TaskOutcome::Known(TaskState::Waiting);
const RUNNING: TaskOutcome = TaskOutcome::Known(TaskState::Running);
const DONE: TaskOutcome = TaskOutcome::Known(TaskState::Done);

fn failed(failure: TaskFailure) -> TaskOutcome {
    TaskOutcome::Known(TaskState::Failed(failure))
}

impl World {
    fn begin(&mut self, request: &TaskRequest) -> TaskOutcome {
        self.task(&Command::BeginTask(request.clone()))
    }

    fn step(&mut self, task: u64, step: TaskStep) -> TaskOutcome {
        self.task(&Command::StepTask { task: TaskId(task), step })
    }

    fn stat(&self, task: u64) -> Option<TaskStat> {
        match self.catalog.query(&Query::Task { task: TaskId(task) }) {
            Answer::Task(stat) => stat,
            other => panic!("{other:?}"),
        }
    }

    fn holders(&self, name: &str) -> Vec<u32> {
        self.replicas(name).iter().map(|replica| replica.node.0).collect()
    }
}

#[test]
fn a_copy_is_done_once_all_targets_count_and_is_kept() {
    let mut world = World::new(3);
    world.stored("a", 1, &[1]);
    assert_eq!(world.begin(&copy(7, "a", &[2, 3])), WAITING);
    assert_eq!(world.step(7, TaskStep::Start), RUNNING);
    world.add(&world.further("a", 1, replica(2, 10)));
    assert_eq!(world.step(7, TaskStep::Settle), RUNNING);
    assert_eq!(world.stat(7).map(|stat| (stat.copied, stat.length)), Some((1, 100)));
    // Nobody takes away what the task is making.
    assert_eq!(world.forget(ForgetMode::SurplusOnly, "a", replica(2, 10)), ForgetOutcome::StillNeeded);
    world.add(&world.further("a", 1, replica(3, 11)));
    assert_eq!(world.step(7, TaskStep::Settle), DONE);
    assert_eq!(world.location("a").copies.wanted(), 3);
    assert_eq!(world.forget(ForgetMode::SurplusOnly, "a", replica(2, 10)), ForgetOutcome::StillNeeded);
}

/// The copy at the source was let go before that at the target counted, or by a command of its own, between which all may die.
#[test]
fn a_move_takes_the_sources_copy_in_the_entry_that_finds_the_targets() {
    let mut world = World::new(3);
    world.stored("a", 1, &[1]);
    world.begin(&moving(7, "a", 1, 2));
    assert_eq!(world.step(7, TaskStep::Settle), WAITING);
    assert_eq!(world.holders("a"), [1]);
    world.add(&world.further("a", 1, replica(2, 10)));
    assert_eq!((world.holders("a"), world.free_list(1)), (vec![1, 2], vec![]));
    assert_eq!(world.step(7, TaskStep::Settle), DONE);
    assert_eq!((world.holders("a"), world.free_list(1)), (vec![2], vec![replica(1, 1)]));
    assert_eq!(world.location("a").copies.wanted(), 1);
    assert_eq!(world.step(7, TaskStep::Settle), DONE, "a repeat");
    assert_eq!(world.holders("a"), [2]);
}

#[test]
fn the_sources_copy_stays_while_the_targets_does_not_count_or_is_less_durable() {
    let mut world = World::new(3);
    let mut item = world.put("a", 1, &[1]);
    item.durability = Durability::Nvme;
    item.replicas[0].durability = Durability::Nvme;
    world.complete(&item);
    world.begin(&moving(7, "a", 1, 2));
    world.add(&world.further("a", 1, replica(2, 10)));
    world.set_state(2, 1, NodeState::Absent);
    assert_eq!(world.step(7, TaskStep::Settle), WAITING);
    world.register(2, 2);
    assert_eq!(world.step(7, TaskStep::Settle), WAITING, "not confirmed in its present life");
    world.apply(&Command::EndAnnouncement { node: NodeId(2), incarnation: Incarnation(2), lost: vec![], last: true });
    assert_eq!(world.step(7, TaskStep::Settle), failed(TaskFailure::StillNeeded));
    assert_eq!(world.holders("a"), [1, 2]);
}

#[test]
fn an_object_that_goes_or_is_replaced_ends_its_tasks() {
    for replace in [false, true] {
        let mut world = World::new(2);
        world.stored("a", 1, &[1]);
        world.begin(&copy(7, "a", &[2]));
        if replace {
            let upsert = CompleteItem { upsert: true, ..world.put("a", 2, &[1, 2]) };
            world.complete(&upsert);
        } else {
            world.remove("a");
        }
        assert_eq!(world.step(7, TaskStep::Settle), failed(TaskFailure::ObjectGone));
        assert_eq!(world.stat(7).map(|stat| stat.copied), Some(0));
    }
}

#[test]
fn a_move_whose_source_loses_its_copy_fails_unless_it_is_at_the_target() {
    let mut world = World::new(3);
    world.stored("a", 1, &[1, 3]);
    world.begin(&moving(7, "a", 1, 2));
    world.begin(&moving(8, "a", 1, 2));
    world.forget(ForgetMode::Lost, "a", replica(1, 1));
    assert_eq!(world.step(7, TaskStep::Settle), failed(TaskFailure::SourceGone));
    world.add(&world.further("a", 1, replica(2, 10)));
    assert_eq!(world.step(8, TaskStep::Fail(TaskFailure::NotCopied)), DONE, "what is so is done, whoever says what");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_begun() {
    let mut world = World::new(4);
    world.set_state(3, 1, NodeState::Draining);
    world.set_state(4, 1, NodeState::Absent);
    world.stored("a", 1, &[1, 2]);
    let no_source = TaskRequest { source: None, ..moving(7, "a", 1, 2) };
    let refusals = [
        (copy(7, "a", &[]), TaskRefusal::Malformed),
        (copy(7, "a", &[2, 2]), TaskRefusal::Malformed),
        (copy(0, "a", &[2]), TaskRefusal::Malformed),
        (moving(7, "a", 1, 1), TaskRefusal::Malformed),
        (no_source, TaskRefusal::Malformed),
        (copy(7, "b", &[2]), TaskRefusal::NoSuchObject),
        (copy(7, "a", &[9]), TaskRefusal::NoSuchNode),
        (copy(7, "a", &[3]), TaskRefusal::NodeNotUp),
        (copy(7, "a", &[4]), TaskRefusal::NodeNotUp),
        (moving(7, "a", 9, 2), TaskRefusal::NotOnSource),
        (moving(7, "a", 3, 2), TaskRefusal::NotOnSource),
        (moving(7, "a", 1, 2), TaskRefusal::TargetHasCopy),
    ];
    for (request, refusal) in refusals {
        assert_eq!(world.begin(&request), TaskOutcome::Refused(refusal), "{request:?}");
    }
    assert_eq!((world.stat(7), world.step(7, TaskStep::Cancel)), (None, TaskOutcome::Unknown));
    let most = CompleteItem { copies: Copies::new(MAX_COPIES, 1).expect("legal"), ..world.put("b", 2, &[1]) };
    world.complete(&most);
    assert_eq!(world.begin(&copy(7, "b", &[2])), TaskOutcome::Refused(TaskRefusal::TooManyCopies));
    // A copy where one is already is done at once.
    assert_eq!(world.begin(&copy(7, "a", &[2])), WAITING);
    assert_eq!(world.step(7, TaskStep::Settle), DONE);
    assert_eq!(world.location("a").copies.wanted(), 1);
}

#[test]
fn a_repeat_is_the_same_task_and_another_one_of_its_id_is_refused() {
    let mut world = World::new(3);
    world.stored("a", 1, &[1]);
    assert_eq!(world.begin(&copy(7, "a", &[2])), WAITING);
    world.step(7, TaskStep::Start);
    assert_eq!(world.begin(&copy(7, "a", &[2])), RUNNING);
    assert_eq!(world.begin(&copy(7, "a", &[3])), TaskOutcome::Refused(TaskRefusal::Mismatch));
    assert_eq!(world.step(7, TaskStep::Cancel), TaskOutcome::Known(TaskState::Cancelled));
    assert_eq!(world.begin(&copy(7, "a", &[2])), TaskOutcome::Known(TaskState::Cancelled));
    assert_eq!(world.step(7, TaskStep::Start), TaskOutcome::Known(TaskState::Cancelled));
    // What a task that was given up has made is one copy too many.
    world.add(&world.further("a", 1, replica(2, 10)));
    let outcome = world.forget(ForgetMode::SurplusOnly, "a", replica(2, 10));
    assert_eq!(outcome, ForgetOutcome::Forgotten { last: false });
}

#[test]
fn failures_that_may_pass_end_a_task_only_when_they_are_many() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    world.begin(&copy(7, "a", &[2]));
    world.begin(&copy(8, "a", &[2]));
    for _ in 1..MAX_TASK_FAILURES {
        assert_eq!(world.step(7, TaskStep::Fail(TaskFailure::NoSpace)), WAITING);
    }
    assert_eq!(world.step(7, TaskStep::Fail(TaskFailure::NoSpace)), failed(TaskFailure::NoSpace));
    let at_once = TaskStep::Fail(TaskFailure::TargetDraining);
    assert_eq!(world.step(8, at_once), failed(TaskFailure::TargetDraining));
}

#[test]
fn a_task_fails_when_its_time_is_over_and_is_forgotten_later() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    world.begin(&copy(7, "a", &[2]));
    world.pass(TASK_LIFETIME - Duration::from_millis(1));
    world.apply(&Command::ExpireSessions);
    assert_eq!(world.stat(7).map(|stat| stat.state), Some(TaskState::Waiting));
    world.pass(Duration::from_millis(1));
    world.apply(&Command::ExpireSessions);
    assert_eq!(world.stat(7).map(|stat| stat.state), Some(TaskState::Failed(TaskFailure::Expired)));
    world.pass(TASK_RETENTION);
    world.apply(&Command::ExpireSessions);
    assert_eq!(world.stat(7), None);
}

#[test]
fn tasks_are_bounded_and_finished_ones_make_room() {
    let mut world = World::new(2);
    world.stored("a", 1, &[1]);
    let begin = |world: &mut World, task: u64| {
        world.index += 1;
        let at = EntryContext { index: LogIndex(world.index), term: Term(1), time: LogTime(world.now) };
        world.catalog.apply(at, &Command::BeginTask(copy(task, "a", &[2])))
    };
    let most = MAX_OPEN_TASKS as u64;
    (1..=most).for_each(|task| assert_eq!(begin(&mut world, task), Outcome::Task(WAITING)));
    assert_eq!(begin(&mut world, most + 1), Outcome::Task(TaskOutcome::TooMany));
    for task in 1..=most {
        world.now += 1;
        let at = EntryContext { index: LogIndex(world.index), term: Term(1), time: LogTime(world.now) };
        world.catalog.apply(at, &Command::StepTask { task: TaskId(task), step: TaskStep::Cancel });
    }
    (most + 1..=2 * most).for_each(|task| assert_eq!(begin(&mut world, task), Outcome::Task(WAITING)));
    world.step(2 * most, TaskStep::Cancel);
    assert_eq!(world.begin(&copy(2 * most + 1, "a", &[2])), WAITING);
    assert_eq!((world.stat(1), world.stat(2).is_some()), (None, true), "the one that ended first");
    let page = |query: Query| {
        let Answer::Tasks(page) = world.catalog.query(&query) else { panic!("no page") };
        (page.tasks.iter().map(|stat| stat.request.task.0).collect::<Vec<_>>(), page.next)
    };
    let of = |tenant, after| Query::Tasks { tenant: Some(tenant), after, limit: 2 };
    assert_eq!(page(of(TENANT, None)), (vec![2, 3], Some(TaskId(3))));
    assert_eq!(page(of(TENANT, Some(TaskId(2 * most)))), (vec![2 * most + 1], None));
    assert_eq!(page(of(TenantId(9), None)), (vec![], None));
    assert_eq!(page(Query::OpenTasks { limit: 2 }), (vec![most + 1, most + 2], None));
}
