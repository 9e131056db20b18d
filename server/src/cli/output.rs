//! How answers look: aligned tables for people, JSON for programs.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::failure::Failure;

/// Where answers go.
#[derive(Debug)]
pub(super) struct Output {
    json: bool,
}

impl Output {
    pub(super) fn new(json: bool) -> Self {
        Self { json }
    }

    pub(super) fn is_json(&self) -> bool {
        self.json
    }

    /// Prints `value` as JSON, or what `human` makes of it.
    pub(super) fn answer<T: Serialize>(
        &self,
        value: &T,
        human: impl FnOnce(&T) -> String,
    ) -> Result<ExitCode, Failure> {
        if self.json {
            let mut text = serde_json::to_string_pretty(value)
                .map_err(|error| Failure::local("OUTPUT", format!("write JSON: {error}")))?;
            text.push('\n');
            self.bytes(text.as_bytes())
        } else {
            self.bytes(human(value).as_bytes())
        }
    }

    /// Writes to standard output. A reader that has gone away (`| head`) is no failure.
    pub(super) fn bytes(&self, bytes: &[u8]) -> Result<ExitCode, Failure> {
        let mut stdout = io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(Failure::local("OUTPUT", format!("write standard output: {error}")))
            }
            _ => Ok(ExitCode::SUCCESS),
        }
    }

    /// Writes a line to standard error. If nobody hears it, there is nobody left to tell.
    pub(super) fn remark(&self, line: &str) {
        let _unheard = writeln!(io::stderr().lock(), "{line}");
    }

    /// A bar on standard error; hidden if that is no terminal, or for JSON.
    pub(super) fn progress(&self, total: u64, template: &str) -> ProgressBar {
        if self.json {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(total).with_style(style);
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }
}

/// Columns as wide as their widest cell; text to the left, numbers to the right.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(|&cell| cell.to_owned()).collect()] }
    }

    pub(super) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.cells(cells.into());
    }

    /// A row of as many cells as there happen to be.
    pub(super) fn cells(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub(super) fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
        let width = |column| self.rows.iter().map(|row| cell(row, column).chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let is_number = |column| {
            let starts = |row: &Vec<String>| cell(row, column).starts_with(|c: char| c.is_ascii_digit() || c == '-');
            self.rows.len() > 1 && self.rows[1..].iter().all(starts)
        };
        let numbers: Vec<bool> = (0..columns).map(is_number).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for column in 0..columns {
                let (cell, width) = (cell(row, column), widths[column]);
                line += &if numbers[column] { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

/// Bytes with a binary unit and three digits: `1.50 GiB`.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut shown = format!("{bytes} B");
    for unit in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
        shown = format!("{value:.digits$} {unit}");
    }
    shown
}

/// Bytes a second, in powers of ten as fio and memcpy benchmarks have them.
pub(super) fn rate(bytes_per_second: f64) -> String {
    format!("{:.2} GB/s", bytes_per_second / 1e9)
}

/// A share with four digits, as the tables of hit ratios have them.
pub(super) fn ratio(share: f64) -> String {
    format!("{share:.4}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["key", "bytes"]);
        table.row(["a".into(), "7".into()]);
        table.row(["long key".into(), "1024".into()]);
        assert_eq!(table.render(), "key       bytes\na             7\nlong key   1024\n");
    }

    #[test]
    fn sizes_have_three_digits() {
        let shown = [0, 1023, 1024, 1536, 20 << 20, 300 << 30, u64::MAX].map(size);
        assert_eq!(shown, ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "20.0 MiB", "300 GiB", "16.0 EiB"]);
    }
}
