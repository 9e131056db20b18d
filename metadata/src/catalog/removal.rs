//! What callers take away: remove, pins, and whole tenants.

use super::Catalog;
use super::command::{MAX_COMMAND_ITEMS, PinItem, Quota, RemoveItem, RequestId};
use super::image::RowKey;
use super::outcome::{PinOutcome, RemoveOutcome, RequestRefusal, TenantOutcome};
use super::sessions::{Remembered, Verdict};
use super::table::Slot;
use crate::object::{ObjectKey, TenantId};

impl Catalog {
    pub(super) fn remove(&mut self, item: &RemoveItem) -> RemoveOutcome {
        let execute = |catalog: &mut Self| Remembered::Remove(catalog.remove_once(item));
        match self.once(item.request, execute) {
            Ok(Remembered::Remove(outcome)) => outcome,
            Ok(_) => RemoveOutcome::Refused(RequestRefusal::Mismatch),
            Err(refusal) => RemoveOutcome::Refused(refusal),
        }
    }

    pub(super) fn pin(&mut self, item: &PinItem) -> PinOutcome {
        self.change_pins(item, |pins| pins.saturating_add(1))
    }

    pub(super) fn unpin(&mut self, item: &PinItem) -> PinOutcome {
        self.change_pins(item, |pins| pins.saturating_sub(1))
    }

    fn change_pins(&mut self, item: &PinItem, change: impl Fn(u32) -> u32) -> PinOutcome {
        let execute = |catalog: &mut Self| Remembered::Pin(catalog.change_pins_once(item, change));
        match self.once(item.request, execute) {
            Ok(Remembered::Pin(outcome)) => outcome,
            Ok(_) => PinOutcome::Refused(RequestRefusal::Mismatch),
            Err(refusal) => PinOutcome::Refused(refusal),
        }
    }

    /// Executes an item unless its request id has an answer already, or is refused.
    fn once(
        &mut self,
        request: Option<RequestId>,
        execute: impl FnOnce(&mut Self) -> Remembered,
    ) -> Result<Remembered, RequestRefusal> {
        let Some(request) = request else { return Ok(execute(self)) };
        match self.judge(request) {
            Verdict::Refuse(refusal) => Err(refusal),
            Verdict::Repeat(answer) => Ok(answer),
            Verdict::Execute => {
                let answer = execute(self);
                self.remember(request, answer);
                Ok(answer)
            }
        }
    }

    pub(super) fn judge(&mut self, request: RequestId) -> Verdict {
        self.changes.insert(RowKey::Session(request.session));
        self.sessions.judge(request, self.time, self.settings.session_lifetime)
    }

    pub(super) fn remember(&mut self, request: RequestId, answer: Remembered) {
        self.sessions.remember(request, answer);
    }

    /// The object of a key, as callers see it.
    pub(super) fn visible(&self, tenant: TenantId, key: &ObjectKey) -> Option<Slot> {
        self.objects.find(tenant, key.as_bytes()).filter(|_| self.tenants.serves(tenant))
    }

    fn remove_once(&mut self, item: &RemoveItem) -> RemoveOutcome {
        let Some(slot) = self.visible(item.tenant, &item.key) else { return RemoveOutcome::Missing };
        let object = self.objects.get(slot);
        if item.version.is_some_and(|version| version != object.version) {
            return RemoveOutcome::Missing;
        }
        if object.pins > 0 && !item.force {
            return RemoveOutcome::Pinned;
        }
        RemoveOutcome::Removed { version: self.drop_object(slot).version }
    }

    fn change_pins_once(&mut self, item: &PinItem, change: impl Fn(u32) -> u32) -> PinOutcome {
        let Some(slot) = self.visible(item.tenant, &item.key) else { return PinOutcome::Missing };
        let object = self.objects.get_mut(slot);
        object.pins = change(object.pins);
        self.changes.place(slot);
        PinOutcome::Pinned { pins: object.pins }
    }

    pub(super) fn create_tenant(&mut self, name: &str, quota: Quota) -> TenantOutcome {
        let outcome = self.tenants.create(name, quota);
        if let TenantOutcome::Created { tenant } = outcome {
            self.changes.insert(RowKey::Tenant(tenant));
        }
        outcome
    }

    pub(super) fn set_quota(&mut self, tenant: TenantId, quota: Quota) -> TenantOutcome {
        self.changes.insert(RowKey::Tenant(tenant));
        self.tenants.set_quota(tenant, quota)
    }

    /// One bounded step of dropping a tenant; its name is free again when the last one is done.
    pub(super) fn drop_tenant(&mut self, tenant: TenantId) -> TenantOutcome {
        if let Err(outcome) = self.tenants.hide(tenant) {
            return outcome;
        }
        self.changes.insert(RowKey::Tenant(tenant));
        for _ in 0..MAX_COMMAND_ITEMS {
            let first = self.objects.range(tenant, &[]).next();
            let slot = first.and_then(|object| self.objects.find(tenant, object.name.key_bytes()));
            match slot {
                Some(slot) => drop(self.drop_object(slot)),
                None => break,
            }
        }
        match self.tenants.objects(tenant) {
            0 => {
                self.tenants.remove(tenant);
                TenantOutcome::Dropped
            }
            remaining => TenantOutcome::Dropping { remaining },
        }
    }
}
