"""Announcements and paths: forged ones are refused, dead edges are not used, paths are shortest."""

from __future__ import annotations

from itertools import combinations, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.dialects.gsb.gsb_packets import MAX_HOPS
from polybus.dialects.gsb.limits import BOUNDS, GsbLimits
from polybus.dialects.gsb.network import topology as topology_module
from polybus.dialects.gsb.network.announcement import MAX_NEIGHBOURS, MAX_SEQUENCE, Announcement
from polybus.dialects.gsb.network.node_key import NodeKey
from polybus.dialects.gsb.network.topology import EXPIRE_S, Novelty, Path, Topology
from polybus.errors import MalformedRequest

KEYS = sorted((NodeKey(bytes([n]) * 32) for n in range(1, 13)), key=lambda key: key.node_id)
IDS = [key.node_id for key in KEYS]
A, B, C, D = IDS[:4]
sequences = count(1)


def announce(node: int, *neighbours: str, sequence: int = 0, instance: int = 1) -> Announcement:
    number = sequence or next(sequences)
    return Announcement.make(KEYS[node], instance, number, tuple(sorted(neighbours)))


def topology(node: int = 0, max_nodes: int = 100, neighbours: tuple[str, ...] = ()) -> Topology:
    made = Topology(IDS[node], max_nodes)
    made.set_own(announce(node, *neighbours))
    return made


def test_an_announcement_survives_the_wire():
    made = announce(0, B, C)
    assert Announcement.decode(made.encode()) == made
    assert made.node_id == A


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("public_key", KEYS[1].public),
        ("public_key", b"short"),
        ("exchange_key", bytes(32)),
        ("sequence", 99),
        ("sequence", 0),
        ("instance", 2),
        ("signature", bytes(64)),
        ("signature", b""),
    ],
)
def test_a_changed_announcement_is_refused(field, value):
    message = announce(0, B, sequence=7).encode()
    setattr(message, field, value)
    with pytest.raises(MalformedRequest, match="an announcement has an invalid"):
        Announcement.decode(message)


@pytest.mark.parametrize(
    "neighbours", [[b"x" * 20] * 2, [b"short"], [b"%020d" % n for n in range(65)]]
)
def test_neighbours_are_checked_before_the_signature(neighbours):
    message = announce(0).encode()
    message.neighbours[:] = neighbours
    assert MAX_NEIGHBOURS == 64
    with pytest.raises(MalformedRequest, match="invalid form"):
        Announcement.decode(message)


def test_changed_neighbours_are_refused():
    message = announce(0, B).encode()
    message.neighbours[:] = [bytes.fromhex(C[2:])]
    with pytest.raises(MalformedRequest, match="invalid signature"):
        Announcement.decode(message)


@pytest.mark.parametrize("sequence", [0, MAX_SEQUENCE + 1])
def test_a_signed_sequence_out_of_its_bounds_is_refused(sequence):
    made = Announcement.make(KEYS[0], 1, sequence, ())
    with pytest.raises(MalformedRequest, match="invalid form"):
        Announcement.decode(made.encode())
    Announcement.decode(Announcement.make(KEYS[0], 1, MAX_SEQUENCE, ()).encode())


def test_an_edge_counts_if_both_ends_announce_it():
    here = topology(neighbours=(B,))
    here.offer(announce(1, C), 0)
    assert here.path_to(B) is None
    here.offer(announce(1, A, C), 0)
    assert here.paths() == {B: Path(B, 1)}
    here.offer(announce(2), 0)  # C is known, and does not announce the link to B
    assert here.path_to(C) is None
    here.offer(announce(2, B), 0)
    assert here.paths() == {B: Path(B, 1), C: Path(B, 2)}
    here.offer(announce(1, A), 0)  # B has lost its link to C
    assert here.path_to(C) is None
    assert here.was_known(C)
    assert not here.was_known(D)


def test_the_newest_announcement_counts():
    here = topology(neighbours=(B,))
    new, old = announce(1, A, sequence=10**6 + 5), announce(1, sequence=10**6 + 4)
    assert here.offer(new, 0) is Novelty.NEWER
    assert here.offer(new, 0) is Novelty.KNOWN
    assert here.offer(old, 0) is Novelty.OLDER
    assert here.path_to(B) == Path(B, 1)


def test_the_table_of_nodes_is_bounded_and_known_nodes_are_still_updated():
    here = topology(max_nodes=2, neighbours=(B, C, IDS[4]))
    assert here.offer(announce(1, A), 0) is Novelty.NEWER
    assert here.offer(announce(2, A), 0) is Novelty.NEWER
    assert here.offer(announce(3), 0) is Novelty.TOO_MANY
    assert here.offer(announce(2, A), 0) is Novelty.NEWER
    assert len(here) == 2
    # A neighbour always has room.
    assert here.offer(announce(4, A), 0) is Novelty.NEWER
    assert len(here) == 2
    assert here.path_to(IDS[4]) == Path(IDS[4], 1)


def test_nodes_without_a_path_make_room_for_others():
    here = topology(max_nodes=2, neighbours=(B,))
    assert here.offer(announce(5), 0) is Novelty.NEWER  # invented, perhaps
    assert here.offer(announce(6), 0) is Novelty.NEWER
    assert here.offer(announce(1, A), 0) is Novelty.NEWER
    assert here.offer(announce(2, B), 0) is Novelty.NEWER
    assert here.path_to(B) == Path(B, 1)


def test_the_farthest_node_makes_room_for_a_neighbour():
    here = topology(max_nodes=2, neighbours=(B, D))
    here.offer(announce(1, A, C), 0)
    here.offer(announce(2, B), 0)
    assert here.path_to(C) == Path(B, 2)
    assert here.offer(announce(3, A), 0) is Novelty.NEWER
    assert here.paths() == {B: Path(B, 1), D: Path(D, 1)}


def test_the_nodes_that_were_known_once_are_bounded(monkeypatch):
    monkeypatch.setattr(topology_module, "MAX_FORGOTTEN", 2)
    here = topology()
    for node in (1, 2, 3):
        here.offer(announce(node), node)
    here.expire(EXPIRE_S + 10)
    assert [here.was_known(one) for one in (B, C, D)] == [False, True, True]


def test_silent_nodes_are_forgotten_and_stay_known():
    here = topology(neighbours=(B, C))
    here.offer(announce(1, A), 0)
    here.offer(announce(2, A), 10)
    assert here.expire(EXPIRE_S + 1) == [B]
    assert (here.path_to(B), here.was_known(B)) == (None, True)
    assert here.path_to(C) == Path(C, 1)


def test_another_process_with_this_nodes_key_is_noticed():
    here = topology()
    (own,) = here.announcements
    assert here.offer(own, 0) is Novelty.KNOWN
    other = announce(0, B, sequence=own.sequence, instance=99)
    assert here.offer(other, 0) is Novelty.OWN
    assert here.offer(announce(0, B), 0) is Novelty.OWN  # of an earlier run, perhaps
    assert here.offer(announce(0, sequence=own.sequence - 1), 0) is Novelty.KNOWN


def test_a_line_is_followed_for_the_longest_way_and_no_further():
    here = topology(neighbours=(IDS[1],))
    for node in range(1, 12):
        around = [IDS[other] for other in (node - 1, node + 1) if other < 12]
        here.offer(announce(node, *around), 0)
    assert here.path_to(IDS[MAX_HOPS]) == Path(B, MAX_HOPS)
    assert here.path_to(IDS[MAX_HOPS + 1]) is None


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(list(combinations(range(8), 2)))))
def test_paths_are_shortest_and_following_them_arrives(edges):
    """Every node computes its own paths; a packet that follows them gets nearer with each hop."""
    around = {node: {a + b - node for a, b in edges if node in (a, b)} for node in range(8)}
    announced = [announce(node, *(IDS[n] for n in around[node])) for node in range(8)]
    views = []
    for node in range(8):
        view = Topology(IDS[node], 100)
        view.set_own(announced[node])
        for other in announced:
            if other.node_id != IDS[node]:
                view.offer(other, 0)
        views.append(view)
    for start in range(8):
        distances, frontier, hops = {start: 0}, {start}, 0
        while frontier:
            hops += 1
            frontier = {n for node in frontier for n in around[node]} - distances.keys()
            distances |= dict.fromkeys(frontier, hops)
        for end in range(8):
            path = views[start].path_to(IDS[end])
            if end == start or end not in distances:
                assert path is None
                continue
            assert path is not None
            assert path.hops == distances[end]
            at, left = start, path.hops
            while at != end:
                step = views[at].path_to(IDS[end])
                assert step is not None
                assert step.hops == left
                at, left = IDS.index(step.via), left - 1


def test_an_announcement_has_room_for_all_links():
    assert BOUNDS["max_links"][1] == MAX_NEIGHBOURS
    assert GsbLimits().max_links <= MAX_NEIGHBOURS
