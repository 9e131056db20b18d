//! Queries: what the catalog answers without changing.

use std::sync::Arc;

use super::command::{NodeState, TypePolicy};
use super::object::{Name, Object, Replica};
use super::query::{
    Answer, BucketPage, Counts, GroupMember, HeldReplica, KeyFilter, ListedObject, Located, MAX_PAGE_ITEMS,
    MatchedObject, Matches, ObjectLocation, ObjectStat, Page, Presence, Query, QuotaRoom, ReplicaLocation,
};
use super::table::Slot;
use super::{Catalog, KeyBucket, each};
use crate::lease::{Leased, group_lease};
use crate::node::NodeId;
use crate::object::{DataType, ObjectKey, ReplicaId, TenantId, VersionId};

impl Catalog {
    /// Answers one question at the index of [`Catalog::applied`].
    #[must_use]
    pub fn query(&self, query: &Query) -> Answer {
        match query {
            Query::Locate { tenant, keys } => Answer::Located(each(keys, |key| self.locate(*tenant, key))),
            Query::Exists { tenant, keys } => Answer::Presence(self.presences(*tenant, keys)),
            Query::List { tenant, prefix, after, limit, data_type } => {
                Answer::Page(self.list(*tenant, prefix, after.as_ref(), *limit, *data_type))
            }
            Query::Matching { tenant, filter, after, limit } => {
                Answer::Matches(self.matching(*tenant, filter, after.as_ref(), *limit))
            }
            Query::Stat { tenant, key } => Answer::Stat(self.stat(*tenant, key)),
            Query::Group { tenant, group } => Answer::Group(self.group(*tenant, group)),
            Query::FreeList { node, after, limit } => Answer::FreeList(self.nodes.free_list(*node, *after, *limit)),
            Query::Digests { node } => Answer::Digests(self.nodes.digests(*node)),
            Query::Bucket { node, bucket, after, limit } => {
                Answer::Bucket(self.held(*node, *bucket, after.as_ref(), *limit))
            }
            Query::Nodes => Answer::Nodes(self.nodes.stats()),
            Query::Expelled { node } => Answer::Expelled(self.expelled.contains(*node)),
            Query::Tenants => Answer::Tenants(self.tenants.stats()),
            Query::Task { task } => Answer::Task(self.task_stat(*task)),
            Query::OpenTasks { limit } => Answer::Tasks(self.open_tasks(*limit)),
            Query::Tasks { tenant, after, limit } => Answer::Tasks(self.task_page(*tenant, *after, *limit)),
            Query::Counts => Answer::Counts(self.counts()),
        }
    }

    /// Where one object is.
    #[must_use]
    pub fn locate(&self, tenant: TenantId, key: &ObjectKey) -> Located {
        match self.visible(tenant, key) {
            Some(slot) => Located::Found(Box::new(self.location(self.objects.get(slot)))),
            None if self.settings.rebuilding => Located::Recovering,
            None => Located::Missing,
        }
    }

    /// Whether one object can be read.
    #[must_use]
    pub fn presence(&self, tenant: TenantId, key: &ObjectKey) -> Presence {
        match self.visible(tenant, key) {
            Some(slot) => self.presence_of(self.objects.get(slot)),
            None if self.settings.rebuilding => Presence::Recovering,
            None => Presence::Missing,
        }
    }

    /// The number of the tenant of that name.
    #[must_use]
    pub fn tenant_named(&self, name: &str) -> Option<TenantId> {
        self.tenants.named(name)
    }

    /// What the tenant may store; nothing if there is none.
    #[must_use]
    pub fn quota_room(&self, tenant: TenantId) -> QuotaRoom {
        self.tenants.room(tenant)
    }

    /// The copies on a node of the next `examined` objects of a tenant, by key behind `after`.
    #[must_use]
    pub fn held_of(&self, node: NodeId, tenant: TenantId, after: Option<&ObjectKey>, examined: usize) -> BucketPage {
        let objects: Vec<&Object> = self.walk(tenant, &[], after).take(examined.clamp(1, MAX_PAGE_ITEMS)).collect();
        let last = objects.last().filter(|_| objects.len() == examined);
        let next = last.map(|last| (tenant, last.name.key()));
        let copy_here = |object: &&Object| object.replicas().find(|replica| replica.id.node == node);
        let held = objects.iter().filter_map(|object| Some(held_replica(object, copy_here(object)?.id)));
        BucketPage { replicas: held.collect(), next }
    }

    /// Whether objects can be read, one answer a key.
    #[must_use]
    pub fn presences<K: AsRef<[u8]>>(&self, tenant: TenantId, keys: &[K]) -> Vec<Presence> {
        self.each_found(tenant, keys, |presence, _| presence)
    }

    /// As [`Catalog::presences`], with what a lease on each object that is there would be of.
    #[must_use]
    pub fn versions<K: AsRef<[u8]>>(&self, tenant: TenantId, keys: &[K]) -> Vec<(Presence, Option<Leased>)> {
        let leased = |object: &Object| Leased {
            tenant,
            version: object.version,
            bytes: object.length,
            group: object.group().map(|group| group_lease(tenant, group)),
        };
        self.each_found(tenant, keys, |presence, object| (presence, object.map(leased)))
    }

    fn each_found<K: AsRef<[u8]>, A>(
        &self,
        tenant: TenantId,
        keys: &[K],
        answer: impl Fn(Presence, Option<&Object>) -> A,
    ) -> Vec<A> {
        let absent = || answer(if self.settings.rebuilding { Presence::Recovering } else { Presence::Missing }, None);
        if !self.tenants.serves(tenant) {
            return keys.iter().map(|_| absent()).collect();
        }
        let mut answers = Vec::with_capacity(keys.len());
        self.objects.find_each(tenant, keys, |slot| {
            let object = slot.map(|slot| self.objects.get(slot));
            answers.push(object.map_or_else(absent, |object| answer(self.presence_of(object), Some(object))));
        });
        answers
    }

    fn presence_of(&self, object: &Object) -> Presence {
        let mut presence = Presence::Unavailable;
        for replica in object.replicas() {
            match self.nodes.get(replica.id.node) {
                Some(node) if node.reads() && node.confirms(replica.id.incarnation) => return Presence::Present,
                Some(node) if node.reads() => presence = Presence::Recovering,
                _ => {}
            }
        }
        presence
    }

    fn location(&self, object: &Object) -> ObjectLocation {
        ObjectLocation {
            version: object.version,
            commit_index: object.commit_index,
            length: object.length,
            slice_bytes: object.slice_bytes,
            data_type: object.data_type,
            checksums: object.checksums().to_vec(),
            group: object.group().cloned(),
            presence: self.presence_of(object),
            copies: object.copies,
            replicas: object.replicas().map(|replica| self.replica_location(replica)).collect(),
        }
    }

    fn replica_location(&self, replica: Replica) -> ReplicaLocation {
        let node = self.nodes.get(replica.id.node);
        ReplicaLocation {
            replica: replica.id,
            durability: replica.durability,
            node_state: node.map_or(NodeState::Absent, |node| node.state),
            confirmed: node.is_some_and(|node| node.confirms(replica.id.incarnation)),
        }
    }

    fn stat(&self, tenant: TenantId, key: &ObjectKey) -> Option<ObjectStat> {
        let object = self.objects.get(self.visible(tenant, key)?);
        Some(ObjectStat {
            listed: listed(object),
            location: self.location(object),
            durability: object.durability,
            copies: object.copies,
        })
    }

    /// Objects from `prefix` on and behind `after`, in key order.
    fn walk<'a>(
        &'a self,
        tenant: TenantId,
        prefix: &'a [u8],
        after: Option<&'a ObjectKey>,
    ) -> impl Iterator<Item = &'a Object> {
        let after = after.map_or(&[][..], ObjectKey::as_bytes);
        self.objects
            .range(tenant, prefix.max(after))
            .filter(move |object| object.name.key_bytes() != after)
            .take_while(move |object| object.name.key_bytes().starts_with(prefix))
            .take_while(move |_| self.tenants.serves(tenant))
    }

    fn list(
        &self,
        tenant: TenantId,
        prefix: &[u8],
        after: Option<&ObjectKey>,
        limit: usize,
        data_type: Option<DataType>,
    ) -> Page {
        let limit = limit.clamp(1, MAX_PAGE_ITEMS);
        let mut page = Page::default();
        let mut last = None;
        // A filter that matches little must not make one page walk everything.
        for (examined, object) in self.walk(tenant, prefix, after).enumerate() {
            if page.objects.len() == limit || examined == MAX_PAGE_ITEMS {
                page.next = last.map(Name::key);
                break;
            }
            last = Some(&object.name);
            if data_type.is_none_or(|wanted| wanted == object.data_type) {
                page.objects.push(listed(object));
            }
        }
        page
    }

    fn matching(&self, tenant: TenantId, filter: &KeyFilter, after: Option<&ObjectKey>, limit: usize) -> Matches {
        let limit = limit.clamp(1, MAX_PAGE_ITEMS);
        let prefix = if let KeyFilter::Prefix(prefix) = filter { &prefix[..] } else { &[] };
        let mut matches = Matches::default();
        let mut last = None;
        for object in self.walk(tenant, prefix, after) {
            if matches.examined == limit as u64 {
                matches.next = last.map(Name::key);
                break;
            }
            last = Some(&object.name);
            matches.examined += 1;
            if let KeyFilter::Pattern(pattern) = filter
                && !pattern.is_match(object.name.key_bytes())
            {
                continue;
            }
            let key = object.name.key();
            matches.objects.push(MatchedObject { key, version: object.version, pins: object.pins });
        }
        matches
    }

    fn group(&self, tenant: TenantId, group: &Arc<str>) -> Vec<GroupMember> {
        if !self.tenants.serves(tenant) {
            return Vec::new();
        }
        let from = (tenant, Arc::clone(group), Slot(0));
        let through = (tenant, Arc::clone(group), Slot(u32::MAX));
        let mut members: Vec<&Object> =
            self.groups.range(from..=through).map(|(_, _, slot)| self.objects.get(*slot)).collect();
        members.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        members.truncate(MAX_PAGE_ITEMS);
        each(&members, |object| GroupMember {
            key: object.name.key(),
            version: object.version,
            presence: self.presence_of(object),
        })
    }

    fn held(&self, node: NodeId, bucket: KeyBucket, after: Option<&(TenantId, ObjectKey)>, limit: usize) -> BucketPage {
        let limit = limit.clamp(1, MAX_PAGE_ITEMS);
        let after = after.map(|(tenant, key)| Name::new(*tenant, key));
        let copy_here = |object: &Object| object.replicas().find(|replica| replica.id.node == node);
        let mut held: Vec<_> = self
            .objects
            .bucket(bucket)
            .filter(|object| after.as_ref().is_none_or(|after| object.name > *after))
            .filter_map(|object| copy_here(object).map(|replica| (object, replica.id)))
            .collect();
        let by_name = |(one, _): &(&Object, _), (other, _): &(&Object, _)| one.name.cmp(&other.name);
        let more = held.len() > limit;
        if more {
            // A bucket has no order of its own; only the page is put into one.
            held.select_nth_unstable_by(limit, by_name);
            held.truncate(limit);
        }
        held.sort_unstable_by(by_name);
        let next = held.last().filter(|_| more).map(|(last, _)| (last.tenant(), last.name.key()));
        BucketPage { replicas: each(&held, |(object, replica)| held_replica(object, *replica)), next }
    }

    /// What becomes of objects of a type, and the bytes of all their copies.
    #[must_use]
    pub fn type_use(&self, data_type: DataType) -> (TypePolicy, u64) {
        let number = data_type as usize;
        (self.settings.types[number], self.type_bytes[number])
    }

    /// What stands for the object's group among leases ([`group_lease`]), if this is its current version and it is in one.
    #[must_use]
    pub fn group_lease_of(&self, tenant: TenantId, key: &ObjectKey, version: VersionId) -> Option<VersionId> {
        let slot = self.find_version(tenant, key, version)?;
        self.objects.get(slot).group().map(|group| group_lease(tenant, group))
    }

    fn counts(&self) -> Counts {
        let (replicas, bytes) = self.nodes.totals();
        Counts {
            applied: self.applied,
            time: self.time,
            objects: self.objects.len() as u64,
            replicas,
            bytes,
            nodes: self.nodes.0.len() as u64,
            tenants: self.tenants.len() as u64,
            sessions: self.sessions.len() as u64,
            remembered: self.sessions.remembered() as u64,
            retired: self.retired.len() as u64,
            settings: self.settings.list(),
        }
    }
}

fn listed(object: &Object) -> ListedObject {
    ListedObject {
        key: object.name.key(),
        version: object.version,
        length: object.length,
        data_type: object.data_type,
        group: object.group().cloned(),
        pins: object.pins,
        replicas: object.replica_count() as u32,
    }
}

fn held_replica(object: &Object, replica: ReplicaId) -> HeldReplica {
    HeldReplica {
        tenant: object.tenant(),
        key: object.name.key(),
        version: object.version,
        commit_index: object.commit_index,
        replica,
    }
}
