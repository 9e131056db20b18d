//! The transfer engine between two processes, by its own bench program (`tidepool-transfer-bench`).

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value as Json;

use super::figure::Value;
use super::{BenchOptions, Bound, Error, Figure};

const MIB: f64 = (1 << 20) as f64;
/// What a process may hold more after all requests than after a tenth of them, in MiB: what allocators keep.
const GROWTH_MAX: f64 = 16.0;

/// Every figure of the engine in turn with its limit.
pub(super) fn run(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let pairs = options.pairs().to_string();
    let seconds = options.side().as_secs_f64().to_string();
    answers(options, &["pairs", "--pairs", &pairs, "--seconds", &seconds])?.iter().map(of_pairs).collect()
}

/// Requests, messages, regions and connections by the million.
pub(super) fn run_soak(options: &BenchOptions) -> Result<Vec<Figure>, Error> {
    let requests = if options.quick { "400000" } else { "10000000" };
    let said = answers(options, &["soak", "--requests", requests])?;
    let [said] = said.as_slice() else { return Err(format!("one line was expected: {said:?}").into()) };
    let remark = format!("{} requests; regions, messages and connections come and go", said["requests"]);
    let grown = |who: &str, name| -> Result<Figure, Error> {
        let at = |index: usize| said[who][index].as_f64().ok_or_else(|| format!("there is no {who} in {said}"));
        let growth = (at(1)? - at(0)?) / MIB;
        Ok(Figure::number(name, growth, "MiB", Some(Bound::AtMost(GROWTH_MAX))).remark(&remark))
    };
    let registered = number(said, "registered_bytes")?;
    Ok(vec![
        grown("own_bytes", "the asking process grows")?,
        grown("target_bytes", "the asked process grows")?,
        Figure::number("still registered at the end", registered, "bytes", Some(Bound::AtMost(0.0))),
    ])
}

/// What the program says, a value a line.
fn answers(options: &BenchOptions, arguments: &[&str]) -> Result<Vec<Json>, Error> {
    let program = options.tidepool.with_file_name("tidepool-transfer-bench");
    let mut command = Command::new(&program);
    let mut child = command
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error} (cargo build --release -p tidepool-transfer)", program.display()))?;
    let lines = child.stdout.take().map(BufReader::new).into_iter().flat_map(BufReader::lines);
    let said = lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect::<Result<_, Error>>();
    let status = child.wait()?;
    if status.success() { said } else { Err(format!("{} ended with {status}", program.display()).into()) }
}

fn number(said: &Json, name: &str) -> Result<f64, Error> {
    said[name].as_f64().ok_or_else(|| format!("there is no {name} in {said}").into())
}

fn of_pairs(said: &Json) -> Result<Figure, Error> {
    let name = format!("engine {}", said["figure"].as_str().unwrap_or_default());
    if let Some(error) = said["error"].as_str() {
        return Ok(Figure::failed(name, &*Error::from(error)));
    }
    let (ours, target) = (number(said, "ours")?, number(said, "target")?);
    let unit = said["unit"].as_str().unwrap_or_default();
    let (of_limit, remark) = match said["limit"].as_f64() {
        Some(limit) => {
            let cpu = number(said, "cpu_ratio")?;
            ("of the limit".to_owned(), format!("{ours:.4e} beside {limit:.4e} {unit}, with {cpu:.2} of its CPU time"))
        }
        None => (unit.to_owned(), String::new()),
    };
    let value = Value::Quartiles {
        median: number(said, "median")?,
        lower: number(said, "lower_quartile")?,
        upper: number(said, "upper_quartile")?,
        unit: of_limit,
    };
    // Times are to be low, rates high.
    let bound = if unit == "s" { Bound::AtMost(target) } else { Bound::AtLeast(target) };
    Ok(Figure { name, value, target: Some(bound), remark })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_of_the_program_becomes_a_figure() {
        let mut said = json!({
            "figure": "tcp-round-trip-4k", "median": 0.22, "lower_quartile": 0.21, "upper_quartile": 0.25, "pairs": 11,
            "ours": 9.1e-6, "limit": 4.1e-5, "unit": "s", "cpu_ratio": 0.59, "target": 1.3, "met": true
        });
        let is_met = |said: &Json| of_pairs(said).ok().and_then(|figure| figure.is_met());
        assert_eq!(is_met(&said), Some(true));
        said["upper_quartile"] = json!(1.5);
        assert_eq!(is_met(&said), Some(false));
        said["unit"] = json!("bytes/s");
        assert_eq!(is_met(&said), Some(false), "a rate of 0.22 where 1.3 is wanted");
        said["target"] = json!(0.2);
        assert_eq!(is_met(&said), Some(true));
        let failed = json!({ "figure": "tcp-read-1m", "error": "iperf3 did not run" });
        assert_eq!(is_met(&failed), Some(false));
        assert!(of_pairs(&json!({ "figure": "x" })).is_err());
    }
}
