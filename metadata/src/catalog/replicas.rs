//! Further copies of objects, and fewer: add, adopt, forget, and the end of a returning node's announcement.

use std::sync::Arc;

use super::command::{AddReplicaItem, AdoptItem, ForgetMode, MAX_REPLICAS, ObjectFacts, ReplicaName};
use super::copies::{Copies, MAX_COPIES};
use super::image::RowKey;
use super::object::{Description, Name, Object, Replica};
use super::outcome::{AddReplicaOutcome, ForgetOutcome, NodeOutcome, Outcome, Refusal};
use super::retired::Stamp;
use super::table::{MAX_OBJECTS, Slot};
use super::tenants::Charge;
use super::{Catalog, each};
use crate::node::{Incarnation, NodeId};
use crate::object::{Durability, ObjectKey, TenantId, VersionId};

/// Most members of a group that go with another one.
const MAX_GROUP_OTHERS: usize = 1024;

impl Catalog {
    /// A copy that its node made now. What is refused is retired: its node frees it on this answer.
    pub(super) fn add_replica(&mut self, item: &AddReplicaItem) -> AddReplicaOutcome {
        let outcome = self.admit_copy(item, |catalog, object| {
            if !catalog.nodes.is_current(item.replica) {
                return Err(Refusal::StaleNode);
            }
            let more = Charge { objects: 0, bytes: object.length };
            let allowed = catalog.tenants.allows(item.tenant, Charge::default(), more)
                && catalog.type_allows(object.data_type, 0, more.bytes);
            if allowed { Ok(()) } else { Err(Refusal::QuotaExceeded) }
        });
        if let Err(refusal) = outcome {
            self.retire(item.replica, Stamp::of(item.reserved_at));
            return AddReplicaOutcome::Refused(refusal);
        }
        AddReplicaOutcome::Added
    }

    /// A copy that a node found after its return. It creates no object, except in a rebuild. A refused one is not
    /// retired: its complete may still be on its way, so its node abandons it before it frees it.
    pub(super) fn adopt(&mut self, item: &AdoptItem) -> AddReplicaOutcome {
        if self.settings.rebuilding
            && let Some(facts) = &item.facts
        {
            self.rebuild_object(&item.copy, facts);
        }
        let copy = &item.copy;
        let life = |catalog: &Self| catalog.nodes.get(copy.replica.node).map(|node| node.incarnation);
        let known = |catalog: &Self| life(catalog).is_some_and(|life| copy.replica.incarnation <= life);
        match self.admit_copy(copy, |catalog, _| if known(catalog) { Ok(()) } else { Err(Refusal::StaleNode) }) {
            Ok(()) => {
                if self.settings.rebuilding {
                    self.rebuild_copies(copy);
                }
                AddReplicaOutcome::Added
            }
            Err(refusal) => AddReplicaOutcome::Refused(refusal),
        }
    }

    /// What a put asked for stands in no slice: as many copies as are announced, as durable as the most durable of them.
    fn rebuild_copies(&mut self, copy: &AddReplicaItem) {
        let Some(slot) = self.find_version(copy.tenant, &copy.key, copy.version) else { return };
        let object = self.objects.get_mut(slot);
        if object.adopted {
            let count = u8::try_from(object.replica_count()).unwrap_or(MAX_COPIES).min(MAX_COPIES);
            object.copies = object.copies.at_least(count);
            object.durability = object.durability.max(copy.durability);
            self.changes.place(slot);
        }
    }

    /// Attaches a copy of a current version unless something or `also` is against it.
    fn admit_copy(
        &mut self,
        item: &AddReplicaItem,
        also: impl Fn(&Self, &Object) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let slot = self.find_version(item.tenant, &item.key, item.version).ok_or(Refusal::NoSuchVersion)?;
        let object = self.objects.get(slot);
        if object.replica(item.replica).is_some() {
            return Ok(());
        }
        if !self.retired.admits(item.reserved_at, self.time) {
            return Err(Refusal::ReservationExpired);
        }
        if self.retired.contains(item.replica) {
            return Err(Refusal::Abandoned);
        }
        if object.has_replica_on(item.replica.node) || object.replica_count() >= MAX_REPLICAS {
            return Err(Refusal::TooManyReplicas);
        }
        also(self, object)?;
        let reserved = Stamp::of(item.reserved_at);
        self.attach(slot, Replica { id: item.replica, reserved, durability: item.durability });
        Ok(())
    }

    pub(super) fn find_version(&self, tenant: TenantId, key: &ObjectKey, version: VersionId) -> Option<Slot> {
        self.visible(tenant, key).filter(|&slot| self.objects.get(slot).version == version)
    }

    /// Makes sure that an announced version is there, if it is the best that was announced of its key so far: the
    /// highest commit index wins, an unknown one (0) loses to any, and what was put since the rebuild began stays.
    fn rebuild_object(&mut self, copy: &AddReplicaItem, facts: &ObjectFacts) {
        let slot = self.objects.find(copy.tenant, copy.key.as_bytes());
        let existing = slot.map(|slot| self.objects.get(slot));
        if let Some(object) = existing.filter(|object| object.version == copy.version) {
            if object.adopted && facts.commit_index > object.commit_index {
                let slot = slot.expect("just seen");
                self.objects.get_mut(slot).commit_index = facts.commit_index;
                self.changes.place(slot);
            }
            return;
        }
        let better = existing.is_none_or(|object| object.adopted && facts.commit_index > object.commit_index);
        let description = describe(copy.version, copy.durability, facts);
        let known = self.nodes.get(copy.replica.node).is_some_and(|node| copy.replica.incarnation <= node.incarnation);
        let admitted = self.retired.admits(copy.reserved_at, self.time) && !self.retired.contains(copy.replica);
        let room = self.objects.len() < MAX_OBJECTS;
        if !(better && description.is_sound() && known && admitted && room && self.tenants.serves(copy.tenant)) {
            return;
        }
        if let Some(slot) = slot {
            self.drop_object(slot);
        }
        let replica = Replica { id: copy.replica, reserved: Stamp::of(copy.reserved_at), durability: copy.durability };
        self.place(Object::new(Name::new(copy.tenant, &copy.key), description, vec![replica]));
    }

    /// `room`: how many members of groups may go with the last copies of others.
    pub(super) fn forget(&mut self, mode: ForgetMode, item: &ReplicaName, room: &mut usize) -> ForgetOutcome {
        let Some((slot, replica)) = self.find_replica(item) else { return ForgetOutcome::Unknown };
        let object = self.objects.get(slot);
        let others_read = self.others(object, replica).count();
        match mode {
            ForgetMode::SurplusOnly if !self.is_surplus(object, replica) => return ForgetOutcome::StillNeeded,
            ForgetMode::EvenLast if object.pins > 0 && others_read == 0 => return ForgetOutcome::Pinned,
            ForgetMode::SurplusOnly | ForgetMode::Lost => {}
            ForgetMode::EvenLast if object.replica_count() == 1 && object.group().is_some() => {
                return self.forget_group(slot, replica, room);
            }
            ForgetMode::EvenLast => {
                // Whoever evicts a copy finds it too cold to be kept: it is not made anew.
                let left = object.replicas().count() - 1;
                let copies = object.copies.at_most(left);
                self.objects.get_mut(slot).copies = copies;
            }
        }
        self.take_away(slot, replica)
    }

    /// A group is evicted as one: with the last copy of a member all others go, unless one of them is pinned. One that is too
    /// large for that, or for what is left of this command's `room`, is as if each member were alone.
    fn forget_group(&mut self, slot: Slot, replica: Replica, room: &mut usize) -> ForgetOutcome {
        let object = self.objects.get(slot);
        let (tenant, group) = (object.tenant(), Arc::clone(object.group().expect("it has one")));
        let first = (tenant, Arc::clone(&group), Slot(0));
        let members = self.groups.range(first..).take_while(|(of, name, _)| (*of, name) == (tenant, &group));
        let others = members.map(|(.., member)| *member).filter(|member| *member != slot);
        let mut others: Vec<Slot> = others.take(MAX_GROUP_OTHERS.min(*room) + 1).collect();
        if others.len() <= MAX_GROUP_OTHERS.min(*room) {
            if others.iter().any(|member| self.objects.get(*member).pins > 0) {
                return ForgetOutcome::Pinned;
            }
            // Slots are not the same on all voters, names are.
            others.sort_by(|one, other| self.objects.get(*one).name.cmp(&self.objects.get(*other).name));
            *room -= others.len();
            others.into_iter().for_each(|member| drop(self.drop_object(member)));
        }
        self.take_away(slot, replica)
    }

    /// Whether as many confirmed copies as there are to be, or as there are nodes for, remain without this one on nodes that
    /// are up, and one at least of the durability that the put asked for, if this one has it. Not while a task makes copies.
    fn is_surplus(&self, object: &Object, replica: Replica) -> bool {
        let kept = object.replicas().filter(|other| other.id != replica.id && self.stays(other)).count();
        kept >= usize::from(object.copies.wanted()).min(self.nodes.up()).max(1)
            && self.keeps_durable(object, replica)
            && !self.tasks.concern(object)
    }

    /// Whether a copy counts as one that stays: confirmed, on a node that is up.
    pub(super) fn stays(&self, copy: &Replica) -> bool {
        self.nodes.get(copy.id.node).is_some_and(|node| node.takes() && node.confirms(copy.id.incarnation))
    }

    /// Whether one of the durability that the put asked for stays without this one, or this one does not have it.
    pub(super) fn keeps_durable(&self, object: &Object, replica: Replica) -> bool {
        let durable = |copy: &Replica| copy.durability >= object.durability;
        !durable(&replica)
            || object.replicas().any(|other| other.id != replica.id && self.stays(&other) && durable(&other))
    }

    /// The other copies on nodes that read.
    fn others<'a>(&'a self, object: &'a Object, replica: Replica) -> impl Iterator<Item = Replica> + 'a {
        let reads = move |other: &Replica| other.id != replica.id && self.nodes.reads(other.id.node);
        object.replicas().filter(reads)
    }

    fn find_replica(&self, item: &ReplicaName) -> Option<(Slot, Replica)> {
        let slot = self.objects.find(item.tenant, item.key.as_bytes())?;
        self.objects.get(slot).replica(item.replica).map(|replica| (slot, replica))
    }

    /// Takes one copy away, and the object with the last one. Its node frees it on this answer.
    fn take_away(&mut self, slot: Slot, replica: Replica) -> ForgetOutcome {
        let last = self.objects.get(slot).replica_count() == 1;
        if last {
            self.displace(slot);
        } else {
            self.detach(slot, replica);
        }
        ForgetOutcome::Forgotten { last }
    }

    pub(super) fn end_announcement(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        lost: &[ReplicaName],
        last: bool,
    ) -> Outcome {
        let outcome = match self.nodes.in_life(node, incarnation) {
            Err(outcome) => return Outcome::Announcement { node: outcome, lost: Vec::new() },
            Ok(known) => {
                known.announcing &= !last;
                NodeOutcome::Accepted { announce: known.announcing }
            }
        };
        self.changes.insert(RowKey::Node(node));
        let is_older = |item: &ReplicaName| item.replica.node == node && item.replica.incarnation < incarnation;
        let lost = each(lost, |item| match self.find_replica(item).filter(|_| is_older(item)) {
            // Pinned or not: what is lost is lost.
            Some((slot, replica)) => self.take_away(slot, replica),
            None => ForgetOutcome::Unknown,
        });
        Outcome::Announcement { node: outcome, lost }
    }
}

fn describe(version: VersionId, durability: Durability, facts: &ObjectFacts) -> Description {
    Description {
        version,
        commit_index: facts.commit_index,
        length: facts.length,
        slice_bytes: facts.slice_bytes,
        data_type: facts.data_type,
        group: None,
        checksums: facts.checksums[..].into(),
        pins: 0,
        durability,
        copies: Copies::ONE,
        adopted: true,
    }
}
