//! One measured figure: what, how much, beside what, and whether that is enough.

use std::fmt;

use serde::Serialize;

use super::pairs::PairSummary;

/// What a figure has to reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
}

/// How a figure was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// Ratio to a limit, by interleaved pairs.
    Pairs(PairSummary),
    /// Median of several, as another program measured them.
    Quartiles {
        /// The median.
        median: f64,
        /// A quarter are at most this.
        lower: f64,
        /// Three quarters are at most this.
        upper: f64,
        /// Its unit.
        unit: String,
    },
    /// A number with a unit.
    Number {
        /// The number.
        value: f64,
        /// Its unit.
        unit: &'static str,
    },
    /// Not measured, and why.
    Missing {
        /// Why.
        why: String,
        /// Whether that counts as missed: an error does, a machine that can't measure it does not.
        is_failure: bool,
    },
}

/// One line of a bench's answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// What was measured.
    pub name: String,
    /// What it was.
    pub value: Value,
    /// What it has to be, if anything.
    pub target: Option<Bound>,
    /// What else is worth knowing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remark: String,
}

impl Figure {
    /// A ratio measured by pairs.
    #[must_use]
    pub fn pairs(name: impl Into<String>, summary: PairSummary, at_least: f64) -> Self {
        let target = Some(Bound::AtLeast(at_least));
        Self { name: name.into(), value: Value::Pairs(summary), target, remark: String::new() }
    }

    /// A number.
    #[must_use]
    pub fn number(name: impl Into<String>, value: f64, unit: &'static str, target: Option<Bound>) -> Self {
        Self { name: name.into(), value: Value::Number { value, unit }, target, remark: String::new() }
    }

    /// Something that this machine can't measure.
    #[must_use]
    pub fn not_measurable(name: impl Into<String>, why: impl Into<String>) -> Self {
        let value = Value::Missing { why: why.into(), is_failure: false };
        Self { name: name.into(), value, target: None, remark: String::new() }
    }

    /// A bench that ended in an error.
    #[must_use]
    pub fn failed(name: impl Into<String>, error: &(dyn std::error::Error + Send + Sync)) -> Self {
        let value = Value::Missing { why: error.to_string(), is_failure: true };
        Self { name: name.into(), value, target: None, remark: String::new() }
    }

    /// Adds what else is worth knowing.
    #[must_use]
    pub fn remark(mut self, remark: impl Into<String>) -> Self {
        self.remark = remark.into();
        self
    }

    /// Whether the target is met; `None` if there is nothing to meet.
    #[must_use]
    pub fn is_met(&self) -> Option<bool> {
        match (&self.value, self.target) {
            (Value::Missing { is_failure, .. }, _) => is_failure.then_some(false),
            (_, None) => None,
            (Value::Pairs(summary), Some(Bound::AtLeast(target))) => Some(summary.reaches(target)),
            (Value::Pairs(summary), Some(Bound::AtMost(target))) => Some(summary.median <= target),
            (Value::Quartiles { median, lower, .. }, Some(Bound::AtLeast(target))) => {
                Some(*median >= target && *lower >= 0.9 * target)
            }
            (Value::Quartiles { median, upper, .. }, Some(Bound::AtMost(target))) => {
                Some(*median <= target && *upper <= 1.1 * target)
            }
            (Value::Number { value, .. }, Some(Bound::AtLeast(target))) => Some(*value >= target),
            (Value::Number { value, .. }, Some(Bound::AtMost(target))) => Some(*value <= target),
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.is_met() {
            Some(true) => "met   ",
            Some(false) => "MISSED",
            None => "      ",
        };
        write!(f, "  {verdict} {:<44} ", self.name)?;
        match &self.value {
            Value::Pairs(summary) => summary.fmt(f)?,
            Value::Quartiles { median, lower, upper, unit } => {
                write!(f, "{median:.4} [{lower:.4}, {upper:.4}] {unit}")?
            }
            Value::Number { value, unit } => write!(f, "{value:.4} {unit}")?,
            Value::Missing { why, .. } => write!(f, "not measured: {why}")?,
        }
        match self.target {
            Some(Bound::AtLeast(target)) => write!(f, "  (target: at least {target})")?,
            Some(Bound::AtMost(target)) => write!(f, "  (target: at most {target})")?,
            None => {}
        }
        if self.remark.is_empty() { Ok(()) } else { write!(f, "\n           {}", self.remark) }
    }
}
