//! What the whole cluster must agree on.

use std::time::Duration;

use super::command::{Setting, TypePolicy};
use super::copies::MAX_COPIES;
use crate::object::{DATA_TYPES, DataType};

/// Bounds of how long a session lives after its last use.
const SESSION_LIFETIME: std::ops::RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(86_400);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) rebuilding: bool,
    pub(super) session_lifetime: Duration,
    /// By the number of the type.
    pub(super) types: [TypePolicy; DATA_TYPES],
}

impl Default for Settings {
    fn default() -> Self {
        Self { rebuilding: false, session_lifetime: Duration::from_secs(600), types: Default::default() }
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
            Setting::Type { data_type, policy } => {
                if policy.copies <= MAX_COPIES {
                    self.types[data_type as usize] = policy;
                }
                Setting::Type { data_type, policy: self.types[data_type as usize] }
            }
        }
    }

    /// Those that are not the default.
    pub(super) fn type_policies(&self) -> impl Iterator<Item = (DataType, TypePolicy)> {
        let numbered = (0..).zip(self.types).filter(|(_, policy)| *policy != TypePolicy::default());
        numbered.filter_map(|(number, policy)| Some((DataType::from_number(number)?, policy)))
    }

    pub(super) fn list(&self) -> Vec<Setting> {
        let types = self.type_policies().map(|(data_type, policy)| Setting::Type { data_type, policy });
        [Setting::Rebuilding(self.rebuilding), Setting::SessionLifetime(self.session_lifetime)]
            .into_iter()
            .chain(types)
            .collect()
    }
}
