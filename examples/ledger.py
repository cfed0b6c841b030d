"""A bookkeeping of what lives in a compressed cache, to judge a slot mapping by. It knows no slot formula."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from serving import PAD, Kind, Request

NOBODY = np.iinfo(np.int64).min


@dataclass(slots=True)
class Account:
    """A request's states in one cache: their slots, their names, and how far the request has come."""

    slots: np.ndarray
    names: np.ndarray
    closed: int
    missing: int  # tokens until the open state closes


class Ledger:
    """What lives in one compressed cache, and what went wrong there.

    The ledger walks each request's tokens as they are scheduled. After every `ratio`-th token that is really
    written it closes a state and deals it the next slot of the request's own pages. States are named after the
    prefix that they belong to, so that requests that share pages must find each other's states there. What a
    mapping wrote is compared with this, and counted slot by slot over each state's life.
    """

    def __init__(self, ratio, states_per_page, num_pages):
        self.ratio, self.states_per_page = ratio, states_per_page
        self.page_slots = np.arange(num_pages * states_per_page).reshape(num_pages, states_per_page)
        self.tenant = np.full(self.page_slots.size, NOBODY)  # name of the state in each slot
        self.writes = np.zeros(self.page_slots.size, np.int64)  # since that state's life began
        self.holders = np.zeros(num_pages, np.int64)
        self.accounts: dict[Request, Account] = {}
        self.private_name = -1
        self.states = 0
        self.step = 0
        self.violations: Counter[str] = Counter()
        self.examples: list[str] = []

    def check(self, step, mapped) -> None:
        """Judge one step. `mapped` is the whole output buffer, with what lies behind the step's tokens."""
        self.step = step.number
        for request in step.admitted:
            self._open(request)
        slots, names = self._walk(step, len(mapped))
        kind = np.full(len(mapped), Kind.PADDED, np.int8)
        kind[: step.num_tokens] = step.kind

        closes, wrote, inside = slots != PAD, mapped != PAD, (mapped >= 0) & (mapped < self.tenant.size)
        for violation, tokens in {
            "a replayed token wrote": wrote & (kind == Kind.REPLAYED),
            "a rejected token wrote": wrote & (kind == Kind.REJECTED),
            "a padded token wrote": wrote & (kind == Kind.PADDED),
            "a token wrote that closes no state": wrote & ~closes & (kind <= Kind.DECODE),
            "the token that closes a state did not write it": closes & ~wrote,
            "a state went to a wrong slot": closes & wrote & (mapped != slots),
            "a slot is outside the cache": wrote & ~inside,
        }.items():
            self._report(violation, "token", np.flatnonzero(tokens))
        self._write(mapped[inside], names[inside])
        for request in step.finished:
            self._close(request)

    def _write(self, slots, names) -> None:
        np.add.at(self.writes, slots, 1)
        self._report("a state was written twice", "slot", slots[self.writes[slots] > 1])
        taken = (self.tenant[slots] != NOBODY) & (self.tenant[slots] != names)
        self._report("a write hit another live state", "slot", slots[taken])
        self.tenant[slots] = names
        self.states += len(slots)

    def _open(self, request) -> None:
        """Begin the life of the states on a request's fresh pages; those on its shared pages must be there."""
        shared, fresh = np.split(request.pages, [request.shared_pages])
        self._report("two live states share a slot", "page", fresh[self.holders[fresh] > 0])
        pages, times = np.unique(request.pages, return_counts=True)
        self._report("two live states share a slot", "page", pages[times > 1])
        self.holders[pages] += 1
        self.tenant[self.page_slots[fresh]] = NOBODY
        self.writes[self.page_slots[fresh]] = 0

        slots = self.page_slots[request.pages].ravel()
        names = self.private_name - np.arange(len(slots))
        self.private_name -= len(slots)
        prefix = np.array(request.page_keys, int)[:, None] * self.states_per_page + np.arange(self.states_per_page)
        names[: prefix.size] = prefix.ravel()
        self.accounts[request] = Account(slots, names, self.page_slots[shared].size, self.ratio)
        self._settle(self.accounts[request])

    def _walk(self, step, length) -> tuple[np.ndarray, np.ndarray]:
        """The slot and the name of the state that each token closes; PAD and NOBODY for the others."""
        slots, names = np.full(length, PAD), np.full(length, NOBODY)
        token = 0
        for request, _, replayed, written, rejected in step.scheduled:
            account = self.accounts[request]
            first, end = token + replayed + account.missing - 1, token + replayed + written
            closers = range(first, end, self.ratio)
            if closers:
                dealt = slice(account.closed, account.closed + len(closers))
                slots[first : end : self.ratio] = account.slots[dealt]
                names[first : end : self.ratio] = account.names[dealt]
                account.closed = dealt.stop
                account.missing = self.ratio - (end - 1 - closers[-1])
            else:
                account.missing -= written
            token = end + rejected
        return slots, names

    def _close(self, request) -> None:
        account = self.accounts.pop(request)
        self._settle(account)
        beyond = account.slots[account.closed :]
        self._report("a slot was written whose state never closed", "slot", beyond[self.writes[beyond] > 0])
        self.holders[np.unique(request.pages)] -= 1

    def _settle(self, account) -> None:
        """Every state that the request has closed or found lies in its slot, written once."""
        slots, names = account.slots[: account.closed], account.names[: account.closed]
        self._report("a live state was not written exactly once", "slot", slots[self.writes[slots] != 1])
        self._report("a slot holds another state", "slot", slots[self.tenant[slots] != names])

    def _report(self, violation, what, places) -> None:
        if len(places):
            self.violations[violation] += len(places)
            self.examples.append(f"step {self.step}, ratio {self.ratio}, {what} {places[0]}: {violation}")
