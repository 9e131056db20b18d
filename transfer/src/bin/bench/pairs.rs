//! Every figure beside its limit: ours, limit, ours, limit, .. The median of the ratios counts.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use tidepool_transfer::{Direction, Settings, TransportKind};

use crate::Error;
use crate::arguments::Arguments;
use crate::initiator::{Initiator, Load};
use crate::limits::{Bare, Cached, Mappings, iperf};
use crate::target::{Process, say};

/// Messages on their way at once in the pipelined figure.
const PIPELINE: usize = 256;

/// What a median has to be.
#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// Measures one side for about as long as it is told.
type Side<'a> = Box<dyn FnMut(Duration) -> Result<f64, Error> + 'a>;

/// What is measured: ours and what counts as 1 beside it.
struct Figure<'a> {
    name: &'static str,
    unit: &'static str,
    bound: Bound,
    ours: Side<'a>,
    /// The best of them is the limit. None: the bound is on ours.
    limits: Vec<Side<'a>>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let pairs = arguments.number("pairs", 11)?.max(1);
    let duration = Duration::from_secs_f64(arguments.seconds("seconds", 1.0)?);
    let wanted = arguments.text("figure");
    let (target, bare) = (Process::start(&["target"])?, Bare::start()?);
    let path = std::env::temp_dir().join(format!("tidepool-bench-{}", std::process::id()));
    let path = path.to_str().ok_or("the temporary folder has no name in UTF-8")?;
    let of_file = Process::start(&["target", "--bytes", "64M", "--file", path])?;
    let cached = RefCell::new(Cached::open(path)?);
    std::fs::remove_file(path)?;
    let file = Initiator::connect(&of_file.address, Settings::default())?;
    let near = Initiator::connect(&target.address, Settings::default())?;
    let far = Initiator::connect(&target.address, Settings { same_host: false, ..Settings::default() })?;
    let mappings = RefCell::new(Mappings::new()?);
    let mut figures = figures(&near, &far, &bare, &mappings);
    figures.extend(figures_of_files(&file, &cached));
    figures.retain(|figure| wanted.is_none_or(|wanted| figure.name.starts_with(wanted)));
    let processes = [std::process::id(), target.id(), of_file.id(), bare.id()];
    for figure in figures {
        let name = figure.name;
        if let Err(error) = measure(figure, pairs, duration, &processes) {
            say(&format!("{{\"figure\":\"{name}\",\"error\":\"{}\"}}", error.to_string().escape_default()))?;
        }
    }
    Ok(())
}

fn figures<'a>(
    near: &'a Initiator,
    far: &'a Initiator,
    bare: &'a Bare,
    mappings: &'a RefCell<Mappings>,
) -> Vec<Figure<'a>> {
    let load = |transport, direction, block_bytes, batch| Load {
        transport: Some(transport),
        direction,
        block_bytes,
        batch,
        threads: 1,
        verify: false,
    };
    let rate = |load| move |duration| near.run(load, duration).map(|moved| moved.bytes as f64 / seconds(moved.elapsed));
    let requests =
        |load| move |duration| near.run(load, duration).map(|moved| moved.requests as f64 / seconds(moved.elapsed));
    // iperf3 has as many streams as the engine.
    let streams = Settings::default().lanes;
    let sockets = |direction| -> Vec<Side<'a>> {
        vec![
            Box::new(move |duration| bare.stream(direction, duration)),
            Box::new(move |duration| {
                iperf(direction, streams, duration).ok_or_else(|| "iperf3 did not run: is it installed?".into())
            }),
        ]
    };
    let one = |load| {
        move |duration| near.run(load, duration).map(|moved| seconds(moved.elapsed) / moved.requests.max(1) as f64)
    };
    let trip = |unix, sent, wanted| move |duration| bare.round_trip(unix, sent, wanted, duration).map(seconds);
    let (shm, tcp) = (TransportKind::SharedMemory, TransportKind::Tcp);
    let (read, write) = (Direction::Read, Direction::Write);
    let mib = 1 << 20;
    vec![
        Figure {
            name: "shm-read-1m",
            unit: "bytes/s",
            bound: Bound::AtLeast(0.8),
            ours: Box::new(rate(load(shm, read, mib, 16))),
            limits: vec![Box::new(|duration| Ok(mappings.borrow_mut().copy(1 << 20, duration)))],
        },
        Figure {
            name: "shm-read-4k",
            unit: "requests/s",
            bound: Bound::AtLeast(2e6),
            ours: Box::new(requests(load(shm, read, 4096, 128))),
            limits: Vec::new(),
        },
        Figure {
            name: "shm-read-4k-beside-memcpy",
            unit: "requests/s",
            bound: Bound::AtLeast(0.8),
            ours: Box::new(requests(load(shm, read, 4096, 128))),
            limits: vec![Box::new(|duration| Ok(mappings.borrow_mut().copy(4096, duration) / 4096.0))],
        },
        Figure {
            name: "tcp-read-1m",
            unit: "bytes/s",
            bound: Bound::AtLeast(0.85),
            ours: Box::new(rate(load(tcp, read, mib, 16))),
            limits: sockets(read),
        },
        Figure {
            name: "tcp-write-1m",
            unit: "bytes/s",
            bound: Bound::AtLeast(0.85),
            ours: Box::new(rate(load(tcp, write, mib, 16))),
            limits: sockets(write),
        },
        Figure {
            name: "tcp-read-4k",
            unit: "requests/s",
            bound: Bound::AtLeast(4e5),
            ours: Box::new(requests(load(tcp, read, 4096, 128))),
            limits: Vec::new(),
        },
        Figure {
            name: "tcp-read-4k-beside-stream",
            unit: "requests/s",
            bound: Bound::AtLeast(0.7),
            ours: Box::new(requests(load(tcp, read, 4096, 128))),
            limits: vec![Box::new(move |duration| Ok(bare.stream(read, duration)? / 4096.0))],
        },
        Figure {
            name: "tcp-round-trip-4k",
            unit: "s",
            bound: Bound::AtMost(1.3),
            ours: Box::new(one(load(tcp, read, 4096, 1))),
            limits: vec![Box::new(trip(false, 72, 4096))],
        },
        Figure {
            name: "message-round-trip-unix",
            unit: "s",
            bound: Bound::AtMost(1.5),
            ours: Box::new(|duration| messages(near, 1, duration)),
            limits: vec![Box::new(trip(true, 64, 64))],
        },
        Figure {
            name: "message-round-trip-tcp",
            unit: "s",
            bound: Bound::AtMost(1.5),
            ours: Box::new(|duration| messages(far, 1, duration)),
            limits: vec![Box::new(trip(false, 64, 64))],
        },
        Figure {
            name: "messages-pipelined-unix",
            unit: "messages/s",
            bound: Bound::AtLeast(2e5),
            ours: Box::new(|duration| messages(near, PIPELINE, duration).map(|each| 1.0 / each)),
            limits: Vec::new(),
        },
        Figure {
            name: "messages-pipelined-tcp",
            unit: "messages/s",
            bound: Bound::AtLeast(2e5),
            ours: Box::new(|duration| messages(far, PIPELINE, duration).map(|each| 1.0 / each)),
            limits: Vec::new(),
        },
    ]
}

/// Files in the page cache: what a disk gives says more of the disk.
fn figures_of_files<'a>(file: &'a Initiator, cached: &'a RefCell<Cached>) -> [Figure<'a>; 3] {
    let figure = |name, transport, block_bytes: u64, batch, least| {
        let load = Load {
            transport: Some(transport),
            direction: Direction::Read,
            block_bytes,
            batch,
            threads: 1,
            verify: false,
        };
        Figure {
            name,
            unit: "bytes/s",
            bound: Bound::AtLeast(least),
            ours: Box::new(move |duration| {
                file.run(load, duration).map(|moved| moved.bytes as f64 / seconds(moved.elapsed))
            }),
            limits: vec![Box::new(move |duration| cached.borrow_mut().read(block_bytes as usize, duration))],
        }
    };
    [
        figure("file-read-1m", TransportKind::File, 1 << 20, 16, 0.8),
        figure("file-read-4k", TransportKind::File, 4096, 128, 0.3),
        figure("file-read-1m-over-tcp", TransportKind::Tcp, 1 << 20, 16, 0.3),
    ]
}

/// Seconds for each message of 64 bytes, so many at once.
fn messages(initiator: &Initiator, at_once: usize, duration: Duration) -> Result<f64, Error> {
    let requests = vec![&[7_u8; 64][..]; at_once];
    let (started, mut count) = (Instant::now(), 0_u64);
    while started.elapsed() < duration {
        let deadline = Instant::now() + Duration::from_secs(5);
        for reply in initiator.engine.call_all(initiator.peer, &requests, deadline)? {
            if reply? != [7; 64] {
                return Err("a wrong reply".into());
            }
        }
        count += at_once as u64;
    }
    Ok(seconds(started.elapsed()) / count.max(1) as f64)
}

/// One pair that warms up, then those that count.
fn measure(mut figure: Figure<'_>, pairs: u64, duration: Duration, processes: &[u32]) -> Result<(), Error> {
    let (mut ours, mut limits, mut ratios, mut cpu_ratios) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for pair in 0..=pairs {
        let before = cpu_seconds(processes);
        let our = (figure.ours)(duration)?;
        let our_cpu = cpu_seconds(processes) - before;
        // Work a second: all sides run about as long.
        let work = |rate: f64| if matches!(figure.bound, Bound::AtMost(_)) { 1.0 / rate } else { rate };
        let (mut limit, mut limit_cpu) = (1.0, f64::NAN);
        for (index, side) in figure.limits.iter_mut().enumerate() {
            let before = cpu_seconds(processes);
            let rate = side(duration)?;
            if index == 0 || work(rate) > work(limit) {
                (limit, limit_cpu) = (rate, cpu_seconds(processes) - before);
            }
        }
        if pair > 0 {
            cpu_ratios.push(our_cpu / work(our) / (limit_cpu / work(limit)));
            ours.push(our);
            limits.push(limit);
            ratios.push(our / limit);
        }
    }
    let (median, lower, upper) = (quantile(&mut ratios, 0.5), quantile(&mut ratios, 0.25), quantile(&mut ratios, 0.75));
    let (target, is_met) = match figure.bound {
        Bound::AtLeast(least) => (least, median >= least && lower >= 0.9 * least),
        Bound::AtMost(most) => (most, median <= most && upper <= 1.1 * most),
    };
    let beside = |value: String| if figure.limits.is_empty() { "null".to_owned() } else { value };
    let limit = beside(format!("{:.6e}", quantile(&mut limits, 0.5)));
    let cpu = beside(format!("{:.3}", quantile(&mut cpu_ratios, 0.5)));
    say(&format!(
        "{{\"figure\":\"{}\",\"median\":{median:.4},\"lower_quartile\":{lower:.4},\"upper_quartile\":{upper:.4},\
         \"pairs\":{pairs},\"ours\":{:.6e},\"limit\":{limit},\"unit\":\"{}\",\"cpu_ratio\":{cpu},\"target\":{target},\"met\":{is_met}}}",
        figure.name,
        quantile(&mut ours, 0.5),
        figure.unit,
    ))
}

/// User and system time of these processes and of children that they waited for.
fn cpu_seconds(processes: &[u32]) -> f64 {
    let of = |id: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // The name, in parentheses, may hold anything; the four times are the 12th to 15th field after it.
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let times = after_name.split_whitespace().skip(11).take(4).filter_map(|text: &str| text.parse::<f64>().ok());
        times.sum::<f64>() / rustix::param::clock_ticks_per_second() as f64
    };
    processes.iter().map(of).sum()
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

/// Between neighbours where it falls between them.
fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let place = share * (values.len() - 1) as f64;
    let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_their_neighbours() {
        let mut values = [3.0, 1.0, 2.0];
        assert_eq!((quantile(&mut values, 0.5), quantile(&mut values, 0.25)), (2.0, 1.5));
        assert_eq!(quantile(&mut [5.0], 0.75), 5.0);
    }
}
