//! Who takes part in the group: voters, learners, and the index of the log as of which that holds.

use raft::eraftpb::ConfState;
use tidepool_metadata::{LogIndex, NodeId};

/// One member: a node, and which log of it.
///
/// A node that lost its log must not come back as the voter that it was: it would vote twice in one term, and the leader
/// would count entries that it no longer has. So it joins anew under another number, and what is addressed to the old one
/// is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub(super) u64);

/// Bit of the life by which a guest is known.
const GUEST: u32 = 1 << 31;

impl MemberId {
    /// The member that `node` is with the log that it began in its life `life`; 0: with the log that formed the group.
    #[must_use]
    pub fn new(node: NodeId, life: u32) -> Self {
        Self(u64::from(life) << 32 | u64::from(node.0))
    }

    /// As [`MemberId::new`], of a node that never votes: it follows the log, and comes and goes as it likes.
    #[must_use]
    pub fn guest(node: NodeId, life: u32) -> Self {
        Self::new(node, life | GUEST)
    }

    /// Whether it is never made a voter.
    #[must_use]
    pub fn is_guest(self) -> bool {
        self.life() & GUEST != 0
    }

    /// The life that it is told from other logs of its node by, as [`MemberId::new`] takes it.
    #[must_use]
    pub fn life(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Whose it is.
    #[must_use]
    pub fn node(self) -> NodeId {
        #[expect(clippy::cast_possible_truncation, reason = "the upper half is the life")]
        NodeId(self.0 as u32)
    }

    /// Raft's number of the member.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// The members as of a log index.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Members {
    pub(super) index: u64,
    pub(super) state: ConfState,
}

// Raft's message has no total equality only for its generated code.
impl Eq for Members {}

/// Lists of members, in the order in which they are written.
const LISTS: usize = 4;
/// Most members of one list that are read: far more than a group has.
const LONGEST_LIST: usize = 1024;

impl Members {
    /// A group whose only voter is `member`, from the beginning.
    #[must_use]
    pub fn alone(member: MemberId) -> Self {
        Self { index: 0, state: ConfState::from((vec![member.0], vec![])) }
    }

    /// As Raft writes them.
    #[must_use]
    pub fn state(&self) -> &ConfState {
        &self.state
    }

    /// As of which entry.
    #[must_use]
    pub fn index(&self) -> LogIndex {
        LogIndex(self.index)
    }

    /// Who votes; in a change, also who voted before it.
    #[must_use]
    pub fn voters(&self) -> Vec<MemberId> {
        let mut voters: Vec<u64> =
            self.state.get_voters().iter().chain(self.state.get_voters_outgoing()).copied().collect();
        voters.sort_unstable();
        voters.dedup();
        voters.into_iter().map(MemberId).collect()
    }

    /// Who follows without a vote.
    #[must_use]
    pub fn learners(&self) -> Vec<MemberId> {
        self.state.get_learners().iter().chain(self.state.get_learners_next()).copied().map(MemberId).collect()
    }

    /// Voters and learners.
    #[must_use]
    pub fn all(&self) -> Vec<MemberId> {
        let mut all = self.voters();
        all.extend(self.learners());
        all.sort_unstable();
        all.dedup();
        all
    }

    /// What stands for `node`, if it is a member.
    #[must_use]
    pub fn of(&self, node: NodeId) -> Option<MemberId> {
        self.all().into_iter().rfind(|member| member.node() == node)
    }

    /// A change of voters is under way: both the old and the new ones decide.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        !self.state.get_voters_outgoing().is_empty()
    }

    /// Nobody but `member`: nothing needs to be sent, and no other voter can come into being without its vote.
    pub(super) fn is_alone(&self, member: MemberId) -> bool {
        self.state.get_voters() == [member.0] && !self.is_changing() && self.learners().is_empty()
    }

    /// The last of `times`, one per voter, that a quorum has reached; `None` if no quorum has one.
    pub(super) fn quorum(&self, time: impl Fn(MemberId) -> Option<u64>) -> Option<u64> {
        let majority = |voters: &[u64]| {
            let mut times: Vec<Option<u64>> = voters.iter().map(|&voter| time(MemberId(voter))).collect();
            times.sort_unstable_by(|one, other| other.cmp(one));
            times.get(voters.len() / 2).copied().flatten()
        };
        let incoming = majority(self.state.get_voters())?;
        match self.state.get_voters_outgoing() {
            [] => Some(incoming),
            outgoing => Some(incoming.min(majority(outgoing)?)),
        }
    }

    /// All of it as bytes: index, whether the change ends by itself, then each list with its length; little-endian.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let state = &self.state;
        let mut bytes = self.index.to_le_bytes().to_vec();
        bytes.push(u8::from(state.auto_leave));
        for list in [&state.voters, &state.voters_outgoing, &state.learners, &state.learners_next] {
            bytes.extend_from_slice(&u32::try_from(list.len()).unwrap_or(u32::MAX).to_le_bytes());
            list.iter().for_each(|member| bytes.extend_from_slice(&member.to_le_bytes()));
        }
        bytes
    }

    /// What [`Members::encode`] wrote.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (&index, rest) = bytes.split_first_chunk()?;
        let (&auto_leave, mut rest) = rest.split_first()?;
        let mut lists: [Vec<u64>; LISTS] = Default::default();
        for list in &mut lists {
            let (&length, behind) = rest.split_first_chunk()?;
            let length = usize::try_from(u32::from_le_bytes(length)).ok().filter(|&length| length <= LONGEST_LIST)?;
            let (numbers, behind) = behind.split_at_checked(8 * length)?;
            list.extend(numbers.chunks_exact(8).map(|number| u64::from_le_bytes(number.try_into().expect("8 bytes"))));
            rest = behind;
        }
        let [voters, outgoing, learners, next] = lists;
        let mut state = ConfState::from((voters, learners));
        (state.voters_outgoing, state.learners_next, state.auto_leave) = (outgoing, next, auto_leave == 1);
        rest.is_empty().then_some(Self { index: u64::from_le_bytes(index), state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(voters: &[u64], outgoing: &[u64], learners: &[u64]) -> Members {
        let mut state = ConfState::from((voters.to_vec(), learners.to_vec()));
        state.voters_outgoing = outgoing.to_vec();
        Members { index: 7, state }
    }

    #[test]
    fn a_quorum_needs_both_halves_of_a_change() {
        let times = |member: MemberId| {
            [None, Some(10), Some(20), Some(30), None, None][usize::try_from(member.0).expect("small")]
        };
        assert_eq!(members(&[1, 2, 3], &[], &[]).quorum(times), Some(20));
        assert_eq!(members(&[1, 2, 3], &[1], &[]).quorum(times), Some(10));
        assert_eq!(members(&[1, 4, 5], &[], &[2]).quorum(times), None);
        assert_eq!(members(&[1, 2, 3], &[3, 4, 5], &[]).quorum(times), None);
        assert_eq!(members(&[3], &[], &[]).quorum(times), Some(30));
    }

    #[test]
    fn what_is_written_is_read_and_no_cut_is() {
        let members = members(&[1, 2, MemberId::new(NodeId(3), 9).0], &[1], &[8]);
        let bytes = members.encode();
        assert_eq!(Members::decode(&bytes), Some(members));
        assert!((0..bytes.len()).all(|length| Members::decode(&bytes[..length]).is_none()));
    }

    #[test]
    fn a_guest_is_known_by_its_number_and_another_member_than_the_same_life_with_a_vote() {
        let node = NodeId(0x8000_0001);
        let guest = MemberId::guest(node, 3);
        assert!(guest.is_guest() && guest.node() == node && guest != MemberId::new(node, 3));
        assert_eq!(MemberId::new(node, guest.life()), guest);
        assert!(!MemberId::new(node, 3).is_guest() && !MemberId::new(node, 0).is_guest());
    }

    #[test]
    fn a_node_is_found_by_its_latest_log() {
        let node = NodeId(0xffff_fff1);
        let (old, new) = (MemberId::new(node, 2), MemberId::new(node, 3));
        assert_eq!(new.node(), node);
        assert_eq!(members(&[old.0, new.0], &[], &[]).of(node), Some(new));
        assert_eq!(members(&[1], &[], &[]).of(node), None);
    }
}
