//! Reads from tasks. A pipe stands in for a disk that takes its time: a read of it is under way until somebody writes.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::Write;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread::ThreadId;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use super::*;
use crate::{Block, IoMemory, Operation, PAGE_BYTES};

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// A file of `pages` pages, each filled with its number.
fn numbered(pages: u8) -> File {
    let mut file = tempfile::tempfile().unwrap();
    (0..pages).for_each(|page| file.write_all(&[page; PAGE_BYTES]).unwrap());
    file
}

/// An engine on a pipe, and the pipe's other end; `None` where io_uring can't be used.
fn engine_on_pipe() -> Option<(Arc<UringEngine>, File)> {
    let (source, target) = io::pipe().unwrap();
    match UringEngine::start(OwnedFd::from(source).into(), &[], 4) {
        Ok(engine) => Some((Arc::new(engine), OwnedFd::from(target).into())),
        Err(error) => {
            eprintln!("skipped: io_uring is not usable here: {error}");
            None
        }
    }
}

/// What the end of a read tells: where the callback ran, the first byte.
type End = io::Result<(ThreadId, u8)>;

/// A read request of one page, and its end.
fn read_page(offset: u64, block: Block) -> (IoRequest, Receiver<End>) {
    let (sender, receiver) = sync_channel(1);
    let done = Box::new(move |completion: Completion| {
        let block = completion.memory.into_blocks().pop();
        let first = block.map_or(0, |block| block[0]);
        let _ = sender.send(completion.result.map(|()| (thread::current().id(), first)));
    });
    (IoRequest { operation: Operation::Read, offset, memory: IoMemory::block(block), done }, receiver)
}

/// Reads a page as a task does.
async fn read_as_task(engine: &dyn IoEngine, page: u8) -> (ThreadId, u8) {
    let (sender, receiver) = oneshot::channel();
    let done = Box::new(move |completion: Completion| {
        completion.result.unwrap();
        let byte = completion.memory.into_blocks().pop().unwrap()[0];
        sender.send((thread::current().id(), byte)).unwrap();
    });
    let memory = IoMemory::block(Block::new(PAGE_BYTES));
    let offset = u64::from(page) * PAGE_BYTES as u64;
    engine.submit_from_task(IoRequest { operation: Operation::Read, offset, memory, done });
    receiver.await.unwrap()
}

#[test]
fn a_driven_read_ends_on_the_runtime_and_any_other_on_the_engines_thread() {
    let Ok(engine) = UringEngine::start(numbered(3), &[], 4) else { return };
    let engine_thread = engine.thread.as_ref().unwrap().thread().id();
    let runtime = runtime();
    runtime.block_on(async {
        assert_eq!(read_as_task(&engine, 1).await, (engine_thread, 1));
        let driver = tokio::spawn(engine.drive());
        tokio::task::yield_now().await;
        assert_eq!(read_as_task(&engine, 2).await, (thread::current().id(), 2));
        driver.abort();
        assert!(driver.await.unwrap_err().is_cancelled());
        assert_eq!(read_as_task(&engine, 0).await, (engine_thread, 0));
        let _driver = tokio::spawn(engine.drive());
        tokio::task::yield_now().await;
        assert_eq!(read_as_task(&engine, 1).await, (thread::current().id(), 1), "driven again");
        engine.drive().await;
        assert_eq!(read_as_task(&engine, 2).await, (thread::current().id(), 2), "a second driver leaves at once");
    });
}

#[test]
fn a_read_that_waits_wakes_the_runtime_when_the_device_is_ready() {
    let Some((engine, mut device)) = engine_on_pipe() else { return };
    runtime().block_on(async {
        tokio::spawn(engine.drive());
        tokio::task::yield_now().await;
        let writer = thread::spawn(move || {
            // In two halves: the first completion is short, the read goes on.
            device.write_all(&[7; PAGE_BYTES / 2]).unwrap();
            device.write_all(&[8; PAGE_BYTES / 2]).unwrap();
            device
        });
        assert_eq!(read_as_task(&*engine, 0).await, (thread::current().id(), 7));
        drop(writer.join());
    });
}

/// The runtime's only thread waits here, so whoever needed it would wait forever.
#[test]
fn blocking_calls_do_not_need_the_runtime_that_drives() {
    let Ok(engine) = UringEngine::start(numbered(2), &[], 4) else { return };
    runtime().block_on(async {
        tokio::spawn(engine.drive());
        tokio::task::yield_now().await;
        let engine: &dyn IoEngine = &engine;
        assert_eq!(engine.read_block(PAGE_BYTES as u64, Block::new(PAGE_BYTES)).unwrap()[0], 1);
        engine.sync().unwrap();
    });
}

#[test]
fn an_abandoned_read_keeps_its_memory_until_the_device_is_done() {
    let Some((engine, mut device)) = engine_on_pipe() else { return };
    let allocation = Allocation::new(PAGE_BYTES);
    runtime().block_on(async {
        tokio::spawn(engine.drive());
        tokio::task::yield_now().await;
        let (request, end) = read_page(0, allocation.lend().unwrap());
        engine.submit_from_task(request);
        drop(end);
        tokio::task::yield_now().await;
        assert!(allocation.lend().is_none(), "the kernel may still write there");
        device.write_all(&[9; PAGE_BYTES]).unwrap();
        while allocation.lend().is_none() {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn a_runtime_that_ends_waits_for_the_reads_that_it_drives() {
    let Some((engine, mut device)) = engine_on_pipe() else { return };
    let runtime = runtime();
    let (request, end) = read_page(0, Block::new(PAGE_BYTES));
    runtime.block_on(async {
        tokio::spawn(engine.drive());
        tokio::task::yield_now().await;
        engine.submit_from_task(request);
    });
    let ending = thread::spawn(move || drop(runtime));
    assert_eq!(end.try_recv().unwrap_err(), TryRecvError::Empty);
    device.write_all(&[5; PAGE_BYTES]).unwrap();
    ending.join().unwrap();
    assert_eq!(end.try_recv().unwrap().unwrap().1, 5);
    // The engine goes on without it.
    device.write_all(&[6; PAGE_BYTES]).unwrap();
    assert_eq!((&*engine as &dyn IoEngine).read_block(0, Block::new(PAGE_BYTES)).unwrap()[0], 6);
}

#[test]
fn dropping_an_engine_waits_for_the_reads_of_tasks_and_ends_their_driver() {
    let Some((engine, mut device)) = engine_on_pipe() else { return };
    let runtime = runtime();
    let (request, end) = read_page(0, Block::new(PAGE_BYTES));
    let driver = runtime.spawn(engine.drive());
    runtime.block_on(async {
        tokio::task::yield_now().await;
        engine.submit_from_task(request);
    });
    let (begun, begins) = sync_channel(1);
    let dropping = thread::spawn(move || {
        begun.send(()).unwrap();
        drop(engine);
    });
    begins.recv().unwrap();
    assert_eq!(end.try_recv().unwrap_err(), TryRecvError::Empty);
    device.write_all(&[5; PAGE_BYTES]).unwrap();
    dropping.join().unwrap();
    assert_eq!(end.try_recv().unwrap().unwrap().1, 5);
    runtime.block_on(driver).unwrap();
}

#[test]
fn reads_of_threads_that_have_ended_complete() {
    let Some((engine, mut device)) = engine_on_pipe() else { return };
    runtime().block_on(async {
        tokio::spawn(engine.drive());
        tokio::task::yield_now().await;
        let (request, end) = read_page(0, Block::new(PAGE_BYTES));
        let submitter = Arc::clone(&engine);
        thread::spawn(move || submitter.submit_from_task(request)).join().unwrap();
        device.write_all(&[3; PAGE_BYTES]).unwrap();
        loop {
            match end.try_recv() {
                Err(TryRecvError::Empty) => tokio::task::yield_now().await,
                end => break assert_eq!(end.unwrap().unwrap().1, 3),
            }
        }
    });
}

#[test]
fn more_reads_than_the_ring_holds_all_complete() {
    let Ok(engine) = UringEngine::start(numbered(100), &[], 2) else { return };
    let engine = Arc::new(engine);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::spawn(engine.drive());
        let read = |page: u8| {
            let engine = Arc::clone(&engine);
            tokio::spawn(async move { read_as_task(&*engine, page).await.1 })
        };
        let reads: Vec<_> = (0..100).map(read).collect();
        for (page, read) in (0..100).zip(reads) {
            assert_eq!(read.await.unwrap(), page);
        }
    });
}

/// What the kernel may still write to is never freed; the engine's own thread goes on.
#[test]
fn a_broken_ring_leaks_what_is_under_way_and_takes_nothing_more() {
    let Some((engine, mut device)) = engine_on_pipe() else { return };
    let allocations = [Allocation::new(PAGE_BYTES), Allocation::new(PAGE_BYTES)];
    let _driven = engine.tasks.as_ref().unwrap().drive_by_hand();
    let (request, first) = read_page(0, allocations[0].lend().unwrap());
    engine.submit_from_task(request);
    assert_eq!(first.try_recv().unwrap_err(), TryRecvError::Empty);
    engine.tasks.as_ref().unwrap().break_ring();
    let (request, second) = read_page(0, allocations[1].lend().unwrap());
    engine.submit_from_task(request);
    assert!(first.recv().unwrap().is_err() && second.recv().unwrap().is_err());
    assert!(allocations.iter().all(|allocation| allocation.lend().is_none()));
    device.write_all(&[1; 2 * PAGE_BYTES]).unwrap();
    let (request, third) = read_page(0, Block::new(PAGE_BYTES));
    engine.submit_from_task(request);
    assert!(third.recv().unwrap().is_ok());
}
