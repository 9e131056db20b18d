//! What the whole cluster must agree on.

use std::time::Duration;

use super::command::Setting;

/// Bounds of how long a session lives after its last use.
const SESSION_LIFETIME: std::ops::RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(86_400);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) rebuilding: bool,
    pub(super) session_lifetime: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { rebuilding: false, session_lifetime: Duration::from_secs(600) }
    }
}

impl Settings {
    /// Sets what is within its bounds; gives the setting as it is now.
    pub(super) fn set(&mut self, setting: Setting) -> Setting {
        match setting {
            Setting::Rebuilding(rebuilding) => {
                self.rebuilding = rebuilding;
                Setting::Rebuilding(self.rebuilding)
            }
            Setting::SessionLifetime(lifetime) => {
                if SESSION_LIFETIME.contains(&lifetime) {
                    self.session_lifetime = Duration::from_millis(lifetime.as_millis() as u64);
                }
                Setting::SessionLifetime(self.session_lifetime)
            }
        }
    }

    pub(super) fn list(&self) -> Vec<Setting> {
        vec![Setting::Rebuilding(self.rebuilding), Setting::SessionLifetime(self.session_lifetime)]
    }
}
