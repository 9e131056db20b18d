use clap::{CommandFactory as _, Parser as _};

use super::*;

#[test]
fn the_arguments_do_not_contradict_each_other() {
    Arguments::command().debug_assert();
}

#[test]
fn global_arguments_may_follow_the_command() {
    let arguments = Arguments::try_parse_from(["tidepool", "get", "hex:00ff", "--json", "--endpoint", "unix:/s"]);
    let arguments = arguments.expect("legal arguments");
    assert!(arguments.json);
    assert!(matches!(arguments.command, Command::Get(_)));
}

#[test]
fn bad_keys_and_contradictions_are_refused_before_anything_is_asked() {
    let wrong: [&[&str]; 6] = [
        &["get", ""],
        &["get", "hex:0"],
        &["rm"],
        &["rm", "key", "--all"],
        &["put", "key", "-", "--type", "nonsense"],
        &["replay", "--block", "64KB"],
    ];
    for arguments in wrong {
        let arguments = std::iter::once(&"tidepool").chain(arguments);
        assert!(Arguments::try_parse_from(arguments).is_err());
    }
}
