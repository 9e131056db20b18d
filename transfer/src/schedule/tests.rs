//! Rails that move bytes at a speed of their own, in simulated time.

use proptest::prelude::*;

use super::*;

/// Rails with true speeds in bytes per second; each moves what it holds in order.
struct Simulated {
    schedule: Schedule<u64>,
    speeds: Vec<f64>,
    held: Vec<VecDeque<(u64, Instant)>>,
    bytes: u64,
    now: Instant,
    ended: Vec<u64>,
}

impl Simulated {
    fn new(speeds: &[f64]) -> Self {
        Self {
            schedule: Schedule::new(speeds.iter().map(|_| BANDWIDTH_UNKNOWN)),
            speeds: speeds.to_vec(),
            held: speeds.iter().map(|_| VecDeque::new()).collect(),
            bytes: 1 << 20,
            now: Instant::now(),
            ended: Vec::new(),
        }
    }

    fn place_all(&mut self) {
        let all = (1 << self.speeds.len()) - 1;
        while let Some(placed) = self.schedule.next(self.now, |waiting| waiting.rails & all) {
            let placed = placed.expect("every rail is usable");
            self.held[usize::from(placed.rail)].push_back((placed.value, self.now));
        }
    }

    /// Moves `count` groups of 1 MiB; gives the seconds that took.
    fn run(&mut self, count: u64) -> f64 {
        let begun = self.now;
        for value in 0..count {
            let waiting = Waiting { value, bytes: self.bytes, priority: Priority::Bulk, rails: u64::MAX };
            self.schedule.push(waiting, false);
        }
        let mut free = vec![self.now; self.speeds.len()];
        self.place_all();
        loop {
            // The rail whose first group ends first.
            let next = (0..self.speeds.len())
                .filter_map(|rail| {
                    let (_, placed) = self.held[rail].front()?;
                    let took = Duration::from_secs_f64(self.bytes as f64 / self.speeds[rail]);
                    Some((free[rail].max(*placed) + took, rail))
                })
                .min();
            let Some((at, rail)) = next else { break };
            let (value, placed) = self.held[rail].pop_front().expect("looked at");
            (self.now, free[rail]) = (at, at);
            self.schedule.finished(rail as RailIndex, self.bytes, Priority::Bulk, placed, at);
            self.ended.push(value);
            self.place_all();
        }
        (self.now - begun).as_secs_f64()
    }

    fn ideal(&self, count: u64) -> f64 {
        (count * self.bytes) as f64 / self.speeds.iter().sum::<f64>()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// However wrong the first belief is: every group moves once, and once the rails are known the end comes within a few
    /// pieces of the slower rails of the ideal.
    #[test]
    fn every_group_moves_once_and_known_rails_share_the_work(
        speeds in proptest::collection::vec(5e7..5e9_f64, 1..6),
        count in 1..300_u64,
    ) {
        let mut simulated = Simulated::new(&speeds);
        simulated.run(count);
        let mut ended = std::mem::take(&mut simulated.ended);
        ended.sort_unstable();
        prop_assert!(ended.into_iter().eq(0..count));
        prop_assert!(simulated.schedule.is_empty());
        for rail in 0..speeds.len() {
            prop_assert_eq!(simulated.schedule.load(rail as RailIndex).in_flight(), 0);
        }
        for _ in 0..6 {
            simulated.run(400);
        }
        let took = simulated.run(400);
        let slowest_piece = simulated.bytes as f64 / speeds.iter().copied().fold(f64::INFINITY, f64::min);
        let bound = simulated.ideal(400) * 1.25 + 2.0 * slowest_piece;
        prop_assert!(took <= bound, "{took} s, ideal {} s, bound {bound} s", simulated.ideal(400));
    }

    /// No sample, however far off, moves the estimate by more than its share of the allowed factor.
    #[test]
    fn no_sample_drowns_the_rest(before in 1e6..1e10_f64, bytes in 0..1_u64 << 40, micros in 1..10_000_000_u64) {
        let mut load = Load::new(before);
        load.sample(bytes, Duration::from_micros(micros));
        let change = load.bandwidth() / before;
        prop_assert!((0.81..=1.76).contains(&change), "{change}");
    }
}

#[test]
fn a_slow_rail_helps_with_a_long_queue_and_is_left_out_of_its_end() {
    let mut simulated = Simulated::new(&[1e9, 1e8]);
    for _ in 0..6 {
        simulated.run(200);
    }
    // One group: the slow rail would be the later one by far.
    simulated.run(1);
    assert_eq!(simulated.schedule.load(0).used, Some(simulated.now - Duration::from_secs_f64(1048576.0 / 1e9)));
    let alone = 400.0 * 1048576.0 / 1e9;
    let took = simulated.run(400);
    assert!(took < alone * 0.97, "{took} s, {alone} s by the fast rail alone");
}

#[test]
fn latency_goes_before_bulk_and_takes_its_room() {
    let now = Instant::now();
    let mut schedule = Schedule::new([1e9]);
    let waiting = |value, priority| Waiting { value, bytes: 1 << 20, priority, rails: 1 };
    (0..100).for_each(|value| schedule.push(waiting(value, Priority::Bulk), false));
    let place = |schedule: &mut Schedule<u64>| {
        std::iter::from_fn(|| schedule.next(now, |waiting| waiting.rails))
            .flatten()
            .map(|placed| placed.value)
            .collect()
    };
    let bulk: Vec<u64> = place(&mut schedule);
    assert!(bulk.len() > 2 && bulk.len() < 20, "{} in flight", bulk.len());
    schedule.push(waiting(1000, Priority::Latency), false);
    let latency: Vec<u64> = place(&mut schedule);
    assert_eq!(latency, [1000], "it does not wait for the window that bulk has filled");
    schedule.push(waiting(1001, Priority::Latency), false);
    schedule.finished(0, 1 << 20, Priority::Bulk, now, now + Duration::from_millis(1));
    let next = schedule.next(now, |waiting| waiting.rails).expect("placed").expect("usable");
    assert_eq!(next.value, 1001);
}

#[test]
fn a_group_moves_when_another_rail_would_be_done_in_the_time_already_spent() {
    let mut schedule: Schedule<u64> = Schedule::new([1e9, 1e8]);
    let bytes = 1 << 20;
    let ten = Duration::from_millis(10);
    assert!(!schedule.should_move(bytes, ten, 0b10), "10.5 ms there");
    assert!(schedule.should_move(bytes, ten, 0b01), "1 ms there");
    assert!(!schedule.should_move(bytes, ten, 0), "nowhere to go");
    let busy = Waiting { value: 0, bytes: 20 << 20, priority: Priority::Bulk, rails: 1 };
    schedule.place(busy, 0, Instant::now());
    assert!(!schedule.should_move(bytes, ten, 0b01), "22 ms there");
}

#[test]
fn a_rail_that_nobody_used_for_long_is_tried_again() {
    let mut simulated = Simulated::new(&[1e9, 1e7]);
    for _ in 0..6 {
        simulated.run(100);
    }
    let believed = simulated.schedule.load(1).bandwidth();
    assert!(believed < 2e8, "{believed}");
    simulated.speeds[1] = 1e9;
    for _ in 0..100 {
        simulated.now += EXPLORE_AFTER;
        simulated.run(8);
    }
    let believed = simulated.schedule.load(1).bandwidth();
    assert!(believed > 5e8, "{believed}");
}

/// A rail that was cut for a moment was believed slow and late for long after, so that the next cut of it was noticed late.
#[test]
fn what_a_cut_cost_is_believed_once_and_not_at_its_length() {
    let (mut schedule, begun) = (Schedule::new([1e9]), Instant::now());
    let waiting = |value| Waiting { value, bytes: 1 << 20, priority: Priority::Bulk, rails: 1 };
    (0..4).for_each(|value| assert_eq!(schedule.place(waiting(value), 0, begun).rail, 0));
    let cut = begun + Duration::from_millis(100);
    (0..4).for_each(|_| schedule.given_back(0, 1 << 20, Priority::Bulk, true, cut));
    assert!(schedule.load(0).bandwidth() > 0.8e9, "{}", schedule.load(0).bandwidth());
    schedule.place(waiting(4), 0, cut);
    schedule.finished(0, 1 << 20, Priority::Bulk, cut, cut + Duration::from_secs(1));
    assert!(schedule.load(0).latency < 1e-3, "{}", schedule.load(0).latency);
}
