//! `tidepool config`: checks settings without starting anything, and prints those that would hold.

use std::process::ExitCode;

use clap::Subcommand;
use serde_json::json;

use super::failure::Failure;
use super::output::Output;
use super::serve::SettingsArguments;

/// What to do with settings.
#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Say whether the settings are right; exit code 2 and the field, value and bounds if one is not
    Check(SettingsArguments),
    /// Print the settings that would hold, defaults included
    Print(SettingsArguments),
}

pub(super) fn run(command: &ConfigCommand, output: &Output) -> Result<ExitCode, Failure> {
    match command {
        ConfigCommand::Check(arguments) => {
            arguments.load()?;
            output.answer(&json!({ "ok": true }), |_| "settings are right\n".into())
        }
        ConfigCommand::Print(arguments) => {
            let config = arguments.load()?;
            let text = toml::to_string_pretty(&config)
                .map_err(|error| Failure::local("OUTPUT", format!("write TOML: {error}")))?;
            output.answer(&config, |_| text)
        }
    }
}
