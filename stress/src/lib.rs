//! Whole systems under load and faults: replay, drills, benchmarks.
