//! The end of a put: complete and abandon.
//!
//! The first completion of a key wins. What loses or is refused is retired before the answer is given, because its
//! nodes free it on that answer, and a repeat of the command must then find nothing to make visible.
//!
//! A client whose put had no answer tries again, by another node perhaps, while the first attempt may still be under way in
//! a node that is frozen. Both carry the put's request id, and only one of them counts.

use super::command::{AbandonItem, CompleteItem, MAX_REPLICAS, NewReplica};
use super::object::{Description, Name, Object, Replica};
use super::outcome::{AbandonOutcome, CompleteOutcome, Refusal, RequestRefusal};
use super::retired::Stamp;
use super::sessions::{Remembered, Verdict};
use super::table::{MAX_OBJECTS, Slot};
use super::tenants::Charge;
use super::{Catalog, each};
use crate::object::DataType;

impl Catalog {
    pub(super) fn complete(&mut self, item: &CompleteItem) -> CompleteOutcome {
        let Some(request) = item.request else { return self.complete_once(item) };
        let outcome = match self.judge(request) {
            Verdict::Execute => {
                let outcome = self.complete_once(item);
                match outcome {
                    CompleteOutcome::Completed { .. } => self.remember(request, Remembered::Put(Some(item.version))),
                    CompleteOutcome::AlreadyExists { .. } => self.remember(request, Remembered::Put(None)),
                    // Said of this attempt: another may fare better.
                    _ => {}
                }
                return outcome;
            }
            // The same attempt, proposed twice.
            Verdict::Repeat(Remembered::Put(Some(version))) if version == item.version => {
                return self.complete_once(item);
            }
            Verdict::Repeat(Remembered::Put(version)) => CompleteOutcome::Repeated { stored: version.is_some() },
            Verdict::Repeat(_) => CompleteOutcome::NotExecuted(RequestRefusal::Mismatch),
            Verdict::Refuse(refusal) => CompleteOutcome::NotExecuted(refusal),
        };
        self.retire_all(item);
        outcome
    }

    fn complete_once(&mut self, item: &CompleteItem) -> CompleteOutcome {
        let existing = self.objects.find(item.tenant, item.key.as_bytes());
        if let Some(object) = existing.map(|slot| self.objects.get(slot))
            && object.version == item.version
        {
            return CompleteOutcome::Completed { replicas: object.replica_count() as u8 };
        }
        let description = self.describe(item, existing);
        let outcome = match self.admit(item, &description, existing) {
            Ok(replicas) => {
                let taken = replicas.len() as u8;
                if let Some(slot) = existing {
                    self.drop_object(slot);
                }
                self.place(Object::new(Name::new(item.tenant, &item.key), description, replicas));
                return CompleteOutcome::Completed { replicas: taken };
            }
            Err(outcome) => outcome,
        };
        self.retire_all(item);
        outcome
    }

    /// The copies with which the item may become visible in place of `existing`.
    fn admit(
        &self,
        item: &CompleteItem,
        description: &Description,
        existing: Option<Slot>,
    ) -> Result<Vec<Replica>, CompleteOutcome> {
        let refuse = |refusal| Err(CompleteOutcome::Refused(refusal));
        if !self.tenants.serves(item.tenant) {
            return refuse(Refusal::UnknownTenant);
        }
        if !description.is_sound() || !has_sound_replicas(item) {
            return refuse(Refusal::Malformed);
        }
        let existing = existing.map(|slot| self.objects.get(slot));
        if let Some(object) = existing
            && !item.upsert
            && self.is_held(object)
        {
            return Err(CompleteOutcome::AlreadyExists { version: object.version });
        }
        if !self.retired.admits(item.reserved_at, self.time) {
            return refuse(Refusal::ReservationExpired);
        }
        let good = |new: &&NewReplica| self.nodes.is_current(new.replica) && !self.retired.contains(new.replica);
        let reserved = Stamp::of(item.reserved_at);
        let replica = |new: &NewReplica| Replica { id: new.replica, reserved, durability: new.durability };
        let replicas: Vec<Replica> = item.replicas.iter().filter(good).map(replica).collect();
        let readable = replicas.iter().filter(|replica| self.nodes.reads(replica.id.node)).count();
        if readable < usize::from(item.copies.minimum()) {
            return refuse(Refusal::TooFewReplicas);
        }
        let less = existing.map(Charge::of).unwrap_or_default();
        let more = Charge { objects: 1, bytes: item.length * replicas.len() as u64 };
        let of_type = existing.filter(|object| object.data_type == item.data_type);
        let type_less = of_type.map_or(0, Object::charged_bytes);
        if !self.tenants.allows(item.tenant, less, more) || !self.type_allows(item.data_type, type_less, more.bytes) {
            return refuse(Refusal::QuotaExceeded);
        }
        if existing.is_none() && self.objects.len() >= MAX_OBJECTS {
            return refuse(Refusal::CatalogFull);
        }
        Ok(replicas)
    }

    /// Whether the quota of a type allows `more` bytes in place of `less`.
    pub(super) fn type_allows(&self, data_type: DataType, less: u64, more: u64) -> bool {
        let (policy, used) = self.type_use(data_type);
        // What does not grow is allowed even above a quota that was lowered.
        more <= less || policy.quota_bytes.is_none_or(|quota| (used - less).saturating_add(more) <= quota)
    }

    /// Pins belong to the key as long as it has an object, so a new version keeps them.
    fn describe(&self, item: &CompleteItem, existing: Option<Slot>) -> Description {
        let kept = existing.map_or(0, |slot| self.objects.get(slot).pins);
        Description {
            version: item.version,
            commit_index: self.applied,
            length: item.length,
            slice_bytes: item.slice_bytes,
            data_type: item.data_type,
            group: item.group.clone(),
            checksums: item.checksums[..].into(),
            pins: u64::from(kept.max(u32::from(item.pin))),
            durability: item.durability,
            copies: item.copies,
            adopted: false,
        }
    }

    /// None of the item's copies will be visible. A malformed item may name some that are; those stay.
    fn retire_all(&mut self, item: &CompleteItem) {
        let slot = self.objects.find(item.tenant, item.key.as_bytes());
        for new in &item.replicas {
            if slot.and_then(|slot| self.objects.get(slot).replica(new.replica)).is_none() {
                self.retire(new.replica, Stamp::of(item.reserved_at));
            }
        }
    }

    pub(super) fn abandon(&mut self, item: &AbandonItem) -> AbandonOutcome {
        let slot = self.objects.find(item.tenant, item.key.as_bytes());
        if let Some(object) = slot.map(|slot| self.objects.get(slot))
            && object.replica(item.replica).is_some()
        {
            return AbandonOutcome::Completed { version: object.version, commit_index: object.commit_index };
        }
        self.retire(item.replica, Stamp::of(self.time));
        AbandonOutcome::Abandoned
    }
}

fn has_sound_replicas(item: &CompleteItem) -> bool {
    let mut nodes = each(&item.replicas, |new| new.replica.node);
    nodes.sort_unstable();
    nodes.dedup();
    nodes.len() == item.replicas.len() && (1..=MAX_REPLICAS).contains(&nodes.len())
}
