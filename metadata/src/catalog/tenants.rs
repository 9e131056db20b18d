//! Tenants: names, quotas, and what each one uses.

use std::collections::BTreeMap;

use super::command::{MAX_NAME_BYTES, Quota};
use super::outcome::TenantOutcome;
use super::query::{QuotaRoom, Room, TenantStat};
use crate::object::TenantId;

/// Most tenants.
pub const MAX_TENANTS: usize = 4096;

#[derive(Default)]
pub(super) struct Tenant {
    pub(super) name: String,
    pub(super) quota: Quota,
    /// It is hidden, and its objects go.
    pub(super) dropping: bool,
    used: Charge,
}

impl Tenant {
    pub(super) fn new(name: String, quota: Quota, dropping: bool) -> Self {
        Self { name, quota, dropping, ..Self::default() }
    }
}

/// What a tenant uses, or a change of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Charge {
    pub(super) objects: u64,
    pub(super) bytes: u64,
}

impl Charge {
    pub(super) fn add(&mut self, more: Self) {
        self.objects += more.objects;
        self.bytes += more.bytes;
    }
}

pub(super) struct Tenants {
    by_id: BTreeMap<TenantId, Tenant>,
    by_name: BTreeMap<String, TenantId>,
    /// Numbers are never used again.
    pub(super) next: TenantId,
}

impl Tenants {
    /// The default tenant alone: its name is empty, and it has no quota until one is set.
    pub(super) fn new() -> Self {
        let mut tenants = Self { by_id: BTreeMap::new(), by_name: BTreeMap::new(), next: TenantId(1) };
        tenants.restore(TenantId::DEFAULT, Tenant::default());
        tenants
    }

    pub(super) fn restore(&mut self, id: TenantId, tenant: Tenant) {
        self.by_name.insert(tenant.name.clone(), id);
        self.by_id.insert(id, tenant);
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn have_distinct_names(&self) -> bool {
        self.by_name.len() == self.by_id.len()
    }

    pub(super) fn get(&self, id: TenantId) -> Option<&Tenant> {
        self.by_id.get(&id)
    }

    /// Whether the tenant exists for callers.
    pub(super) fn serves(&self, id: TenantId) -> bool {
        self.get(id).is_some_and(|tenant| !tenant.dropping)
    }

    pub(super) fn objects(&self, id: TenantId) -> u64 {
        self.get(id).map_or(0, |tenant| tenant.used.objects)
    }

    pub(super) fn create(&mut self, name: &str, quota: Quota) -> TenantOutcome {
        if let Some(&tenant) = self.by_name.get(name) {
            let dropping = self.by_id[&tenant].dropping;
            return if dropping { TenantOutcome::Refused } else { TenantOutcome::Exists { tenant } };
        }
        if !(1..=MAX_NAME_BYTES).contains(&name.len()) || self.len() >= MAX_TENANTS || self.next.0 == u32::MAX {
            return TenantOutcome::Refused;
        }
        let tenant = self.next;
        self.next = TenantId(tenant.0 + 1);
        self.restore(tenant, Tenant::new(name.to_owned(), quota, false));
        TenantOutcome::Created { tenant }
    }

    pub(super) fn set_quota(&mut self, id: TenantId, quota: Quota) -> TenantOutcome {
        match self.by_id.get_mut(&id) {
            Some(tenant) if !tenant.dropping => {
                tenant.quota = quota;
                TenantOutcome::Changed
            }
            _ => TenantOutcome::Unknown,
        }
    }

    /// Hides the tenant; it goes once it has no objects.
    pub(super) fn hide(&mut self, id: TenantId) -> Result<(), TenantOutcome> {
        if id == TenantId::DEFAULT {
            return Err(TenantOutcome::Refused);
        }
        self.by_id.get_mut(&id).map(|tenant| tenant.dropping = true).ok_or(TenantOutcome::Unknown)
    }

    pub(super) fn remove(&mut self, id: TenantId) {
        if let Some(tenant) = self.by_id.remove(&id) {
            assert_eq!(tenant.used, Charge::default(), "a tenant with objects cannot go");
            self.by_name.remove(&tenant.name);
        }
    }

    /// The tenant of that name, if it exists for callers.
    pub(super) fn named(&self, name: &str) -> Option<TenantId> {
        self.by_name.get(name).copied().filter(|&id| self.serves(id))
    }

    pub(super) fn room(&self, id: TenantId) -> QuotaRoom {
        let Some(Tenant { quota, used: Charge { objects, bytes }, .. }) = self.get(id) else {
            return QuotaRoom::default();
        };
        let left = |quota: Option<u64>, used| quota.map_or(u64::MAX, |quota| quota.saturating_sub(used));
        QuotaRoom {
            whole: Room { objects: left(quota.objects, 0), bytes: left(quota.bytes, 0) },
            left: Room { objects: left(quota.objects, *objects), bytes: left(quota.bytes, *bytes) },
        }
    }

    /// Whether the quota allows `more` in place of `less`.
    pub(super) fn allows(&self, id: TenantId, less: Charge, more: Charge) -> bool {
        let Some(tenant) = self.get(id) else { return false };
        let within = |used: u64, less: u64, more: u64, quota: Option<u64>| {
            // What does not grow is allowed even above a quota that was lowered.
            more <= less || quota.is_none_or(|quota| (used - less).saturating_add(more) <= quota)
        };
        within(tenant.used.bytes, less.bytes, more.bytes, tenant.quota.bytes)
            && within(tenant.used.objects, less.objects, more.objects, tenant.quota.objects)
    }

    fn used(&mut self, id: TenantId) -> &mut Charge {
        &mut self.by_id.get_mut(&id).expect("objects have known tenants").used
    }

    pub(super) fn charge(&mut self, id: TenantId, charge: Charge) {
        self.used(id).add(charge);
    }

    pub(super) fn refund(&mut self, id: TenantId, charge: Charge) {
        let used = self.used(id);
        used.objects -= charge.objects;
        used.bytes -= charge.bytes;
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = TenantId> {
        self.by_id.keys().copied()
    }

    pub(super) fn stats(&self) -> Vec<TenantStat> {
        let stat = |(&id, tenant): (&TenantId, &Tenant)| TenantStat {
            tenant: id,
            name: tenant.name.clone(),
            quota: tenant.quota,
            objects: tenant.used.objects,
            bytes: tenant.used.bytes,
            dropping: tenant.dropping,
        };
        self.by_id.iter().map(stat).collect()
    }

    /// Asserts that what is used is what `charges` add up to.
    pub(super) fn validate(&self, charges: impl Iterator<Item = (TenantId, Charge)>) {
        assert!(self.by_id.contains_key(&TenantId::DEFAULT), "the default tenant always exists");
        assert_eq!(self.by_name.len(), self.by_id.len(), "names of tenants");
        let mut sums: BTreeMap<TenantId, Charge> = BTreeMap::new();
        for (tenant, charge) in charges {
            sums.entry(tenant).or_default().add(charge);
        }
        for (id, tenant) in &self.by_id {
            assert!(*id < self.next, "a number to come: {id:?}");
            assert_eq!(self.by_name.get(&tenant.name), Some(id));
            assert_eq!(tenant.used, sums.remove(id).unwrap_or_default(), "use of tenant {id:?}");
        }
        assert!(sums.is_empty(), "objects of unknown tenants");
    }
}
