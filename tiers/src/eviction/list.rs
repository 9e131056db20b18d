//! Doubly linked lists threaded through one array of links.

const NONE: u32 = u32::MAX;
/// Stands for the neighbours of an id that is in no list.
const OUTSIDE: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug)]
struct Link {
    previous: u32,
    next: u32,
}

/// The array: an id is in at most one list over it.
#[derive(Debug, Default)]
pub(super) struct Links {
    links: Vec<Link>,
}

impl Links {
    /// Whether `id` is in a list.
    pub(super) fn has(&self, id: u32) -> bool {
        self.links.get(id as usize).is_some_and(|link| link.next != OUTSIDE)
    }
}

/// One list: its newest and its oldest id.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    newest: u32,
    oldest: u32,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { newest: NONE, oldest: NONE, len: 0 }
    }
}

impl List {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Adds `id`, which is in no list, as the newest.
    pub(super) fn push(&mut self, links: &mut Links, id: u32) {
        let needed = id as usize + 1;
        if links.links.len() < needed {
            links.links.resize(needed.next_multiple_of(1024), Link { previous: OUTSIDE, next: OUTSIDE });
        }
        links.links[id as usize] = Link { previous: NONE, next: self.newest };
        match self.newest {
            NONE => self.oldest = id,
            newest => links.links[newest as usize].previous = id,
        }
        self.newest = id;
        self.len += 1;
    }

    /// Takes out `id`, which is in this list.
    pub(super) fn remove(&mut self, links: &mut Links, id: u32) {
        let outside = Link { previous: OUTSIDE, next: OUTSIDE };
        let Link { previous, next } = std::mem::replace(&mut links.links[id as usize], outside);
        match previous {
            NONE => self.newest = next,
            previous => links.links[previous as usize].next = next,
        }
        match next {
            NONE => self.oldest = previous,
            next => links.links[next as usize].previous = previous,
        }
        self.len -= 1;
    }

    /// The ids from the newest on.
    pub(super) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = u32> + use<'a> {
        let first = (self.newest != NONE).then_some(self.newest);
        std::iter::successors(first, |&id| Some(links.links[id as usize].next).filter(|&next| next != NONE))
    }
}
