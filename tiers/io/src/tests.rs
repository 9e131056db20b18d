#![expect(clippy::unwrap_used, reason = "tests")]

use super::*;

/// A landing of a fixed vector, filled from the front.
struct Target(Vec<u8>, usize);

impl Landing for Target {
    fn spare(&mut self) -> &mut [u8] {
        &mut self.0[self.1..]
    }

    fn advance(&mut self, count: usize) {
        self.1 += count;
    }
}

fn round_trip(engine: &dyn IoEngine, allocation: &Arc<Allocation>) {
    let mut block = allocation.lend().unwrap();
    for (index, byte) in block.iter_mut().enumerate() {
        *byte = (index / 7) as u8;
    }
    let expected = block.to_vec();
    engine.write_block(0, block.split_to(2 * PAGE_BYTES)).unwrap();
    engine.write_block(2 * PAGE_BYTES as u64, block).unwrap();
    engine.sync().unwrap();
    let read = engine.read_block(0, Block::new(expected.len())).unwrap();
    assert_eq!(&read[..], &expected[..]);

    // Head and tail into blocks, the middle in place.
    let target = Box::new(Target(vec![0; PAGE_BYTES], 0));
    let memory = IoMemory::landing(Some(Block::new(1)), target, PAGE_BYTES, Some(Block::new(1)));
    let (blocks, landing) = engine.run(Operation::Read, 0, memory).unwrap().into_parts();
    let middle = (landing.unwrap() as Box<dyn std::any::Any>).downcast::<Target>().unwrap();
    assert_eq!(&blocks[0][..], &expected[..PAGE_BYTES]);
    assert_eq!(middle.0, &expected[PAGE_BYTES..2 * PAGE_BYTES]);
    assert_eq!(&blocks[1][..], &expected[2 * PAGE_BYTES..3 * PAGE_BYTES]);

    let beyond = engine.read_block(expected.len() as u64, Block::new(1));
    assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn blocking_engine_writes_and_reads() {
    let engine = BlockingEngine::start(tempfile::tempfile().unwrap(), 4).unwrap();
    round_trip(&engine, &Allocation::new(4 * PAGE_BYTES));
}

#[test]
fn uring_engine_writes_and_reads() {
    let allocation = Allocation::new(4 * PAGE_BYTES);
    let buffers = [Arc::clone(&allocation)];
    match UringEngine::start(tempfile::tempfile().unwrap(), &buffers, 4) {
        Ok(engine) => round_trip(&engine, &allocation),
        Err(error) => eprintln!("skipped: io_uring is not usable here: {error}"),
    }
}

#[test]
fn more_operations_than_the_ring_holds_all_complete() {
    let Ok(engine) = UringEngine::start(tempfile::tempfile().unwrap(), &[], 2) else { return };
    let (sender, receiver) = mpsc::channel();
    for index in 0..100_u64 {
        let mut block = Block::new(PAGE_BYTES);
        block.fill(index as u8);
        let sender = sender.clone();
        let done = Box::new(move |completion: Completion| sender.send(completion.result).unwrap());
        let memory = IoMemory::block(block);
        engine.submit(IoRequest { operation: Operation::Write, offset: index * PAGE_BYTES as u64, memory, done });
    }
    drop(sender);
    assert_eq!(receiver.iter().filter(Result::is_ok).count(), 100);
    let read = (&engine as &dyn IoEngine).read_block(77 * PAGE_BYTES as u64, Block::new(1)).unwrap();
    assert!(read.iter().all(|&byte| byte == 77));
}

#[test]
fn dropping_an_engine_finishes_what_was_submitted() {
    let file = tempfile::tempfile().unwrap();
    for start in [true, false] {
        let (sender, receiver) = mpsc::channel();
        let choice = if start { EngineChoice::Auto } else { EngineChoice::Blocking };
        let (engine, _) = start_engine(choice, file.try_clone().unwrap(), &[], 4).unwrap();
        for index in 0..20 {
            let sender = sender.clone();
            let done = Box::new(move |completion: Completion| sender.send(completion.result.is_ok()).unwrap());
            let memory = IoMemory::block(Block::new(1));
            engine.submit(IoRequest { operation: Operation::Write, offset: index * PAGE_BYTES as u64, memory, done });
        }
        drop(engine);
        assert_eq!(receiver.try_iter().filter(|&good| good).count(), 20);
    }
}
