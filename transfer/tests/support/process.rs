//! Tests whose process nothing else may happen in: they change what belongs to all of it.

use std::process::Command;

/// Names the test that is to run.
const VARIABLE: &str = "TIDEPOOL_OWN_PROCESS";

/// Runs `test` in a process of its own; `name` is that of the test that calls this, with its modules.
pub(crate) fn in_own_process(name: &str, test: impl FnOnce()) {
    if std::env::var_os(VARIABLE).is_some_and(|this| this == name) {
        return test();
    }
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    let output = command.args([name, "--exact"]).env(VARIABLE, name).output().expect("ran");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}
