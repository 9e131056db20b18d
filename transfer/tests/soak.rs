//! The short form of the long run: `tidepool-transfer-bench soak` makes ten million requests.

use std::process::Command;

#[test]
fn nothing_grows_while_requests_messages_regions_and_connections_come_and_go() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidepool-transfer-bench"));
    let output = command.args(["soak", "--requests", "400000"]).output().expect("ran");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("\"registered_bytes\":0,\"batches\":0"), "{said}");
}
