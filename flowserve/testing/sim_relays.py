"""Simulated relays: batches that are handed from instance to instance, and what becomes of them on the way.

Decided here: where a relay of a simulated server (sim.py) ends, and which of its instances is free when, as far as
processes may differ in that: it runs through, comes back early from any of its stops, is fenced off, loses any of its
processes, or is not worth it in the first place. And what must be true when one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from random import Random

from flowserve.errors import FlowserveError, InstanceDied, ModelFailed
from flowserve.graph.plan import NO_SLOT
from flowserve.graph.types import ModelKey
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.relays import Relay, RelayingDispatcher, whole_way
from flowserve.scheduling.router import Flow, Ticket
from flowserve.testing.sim_laws import Laws, number_of, step_of
from flowserve.testing.sim_world import Handle, SimModel, SimRequest, World, is_omitted

Column = list[Handle | None]


class OnItsWay:
    """A relay that was begun. `made[i]` is what its i-th stop makes, as far as it gets; after those one raises, where
    `raises`. `left`: stops whose instances are not free yet. `is_over`: its requests have gone on, or failed.
    """

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.made: list[tuple[list[Column], dict[int, FlowserveError]]] = []
        self.raises = False
        self.left = {*range(len(relay.instances))}
        self.is_over = False

    @property
    def reached(self) -> int:
        """How many stops had the batch when it came back."""
        return len(self.made) + self.raises


class Relays(Laws):
    """The part of a simulated server that its relays are."""

    def __init__(self, random: Random, world: World) -> None:
        super().__init__(random, world)
        self.relayed = 0  # steps that were run by relays, without a queue
        self.lone = 0  # requests that were alone, and on their way at once
        self.handed_on: list[int] = []  # how many requests each relay had

    def _make(
        self, batch: Batch, model: SimModel, made: Mapping[tuple[int, int], Handle | None]
    ) -> list[Column] | None:
        """The outputs, or None where the batch raises. `made` holds what is not in the flows: by member and slot."""
        raise NotImplementedError

    def _begin(self, batch: Batch, model: SimModel) -> None:
        """These steps run now, and have waited in their queue."""
        raise NotImplementedError

    def _relay(self, relay: Relay) -> bool:
        if self._random.random() < 0.15:
            self._note("is not handed on", *map(number_of, relay.batch.tickets))
            return False
        self._check_relay(relay)
        self._hand_on(relay)
        return True

    def _goes_alone(self, flow: Flow) -> bool:
        """Whether a request that comes when no other is in flight is on its way before it is submitted."""
        dispatcher = self.dispatcher
        if not isinstance(dispatcher, RelayingDispatcher) or dispatcher.in_flight or self._random.random() < 0.3:
            return False
        way = whole_way(flow.plan, flow.route)
        if way is None or not all(queue.free for queue in way.queues):
            return False
        request: SimRequest = flow.request
        if not 0 < request.rows <= min(way.row_max, way.nodes[0].max_batch_size):
            return False
        instances = [self._random.choice(queue.free) for queue in way.queues]
        self.lone += 1
        relay = dispatcher.adopt(flow, way, instances, self.time)
        self._check_relay(relay)
        self._hand_on(relay)
        return True

    def _hand_on(self, relay: Relay) -> None:
        sent = OnItsWay(relay)
        self.handed_on.append(len(relay.batch.tickets))
        self._decide(sent)
        self._begin(relay.batch, self.world.by_key[relay.batch.queue.key])
        for i in range(len(relay.instances)):
            batch = relay.stop(i)
            self._busy.add((batch.queue.key, batch.instance))
            self._running.update(map(step_of, batch.tickets))
        for i in range(sent.reached):
            self.batch_rows[relay.way.queues[i].key].append(relay.batch.rows)
        keys = [key.name for key in self._models(relay)]
        self._note("is handed on", *keys, *relay.instances, *map(number_of, relay.batch.tickets))
        self._send(sent)

    def _models(self, relay: Relay) -> list[ModelKey]:
        return [queue.key for queue in relay.way.queues]

    def _check_relay(self, relay: Relay) -> None:
        way = relay.way
        assert len(way.nodes) == len(way.queues) == len(relay.instances)
        assert len({*self._models(relay)}) == len(way.queues), "a relay comes to a model twice"
        stops, plan = {node.index for node in way.nodes}, relay.batch.tickets[0].flow.plan
        for node in way.nodes[:-1]:
            for slot in node.outputs:
                assert slot == NO_SLOT or stops.issuperset(plan.consumers[slot]), "another step waits for a relay's end"
        for i, queue in enumerate(way.queues):
            model = self.world.by_key[queue.key]
            batch = relay.stop(i)
            self._check_batch(batch, model)
            assert not len(queue.batcher), f"a relay overtakes whoever waits for {queue.key}"
            for number, index in self._again:
                flow = self.flows.get(number)
                again = flow is not None and flow.plan.nodes[index].model == queue.key
                assert not again, f"a relay overtakes what {queue.key} is to try again"
            assert not model.devices, f"{queue.key} has a line for each device"
            assert not model.keeps_order, f"{queue.key} keeps the order of those that come one by one"
            assert model.passes_on or i == len(way.queues) - 1
            assert i == 0 or len(batch.tickets) <= model.receives, f"{queue.key} would have waited for company"
            for ticket in batch.tickets:
                assert ticket.flow.route[ticket.node.index] is queue
                assert ticket.flow.open > 0

    # ------------------------------------------------------------------------------------------------ how it goes on

    def _decide(self, sent: OnItsWay) -> None:
        """How far it gets by what its members are. Models read their inputs now: they may be gone when it is back."""
        relay = sent.relay
        made: dict[tuple[int, int], Handle | None] = {}
        turns = self._random.randrange(len(relay.instances)) if self._random.random() < 0.15 else -1
        for i, node in enumerate(relay.way.nodes):
            batch = relay.stop(i)
            model = self.world.by_key[batch.queue.key]
            outputs = self._make(batch, model, made)
            if outputs is None:
                sent.raises = True
                return
            errors: dict[int, FlowserveError] = {}
            is_odd = i == turns
            for m, ticket in enumerate(batch.tickets):
                if model.key in ticket.flow.request.faults:
                    errors[m] = ModelFailed("a fault of its own")
                is_odd |= any(is_omitted(model, ticket.flow.request, j) for j in range(len(model.outputs)))
                made.update({(m, slot): outputs[j][m] for j, slot in enumerate(node.outputs) if slot != NO_SLOT})
            sent.made.append((outputs, errors))
            if errors or is_odd:
                return

    def _send(self, sent: OnItsWay) -> None:
        models = [self.world.by_key[key] for key in self._models(sent.relay)]
        ns = sum(self._random.randint(model.shortest_ns, model.longest_ns) for model in models[: sent.reached])
        becomes = self._random.random()
        if becomes < 0.15:
            self._fence_off(sent, ns)
        if 0.05 < becomes < 0.25:
            count = min(len(models), self._random.choice([1, 1, 2]))
            for i in self._random.sample(range(len(models)), count):
                self._at(self.time + self._random.randint(0, ns), partial(self._process_ends, sent, i))
        elif not ns:
            self._come_back(sent)
            return
        self._at(self.time + ns + 1, partial(self._come_back, sent))

    def _fence_off(self, sent: OnItsWay, ns: int) -> None:
        """Each process but the one that has it says so and is free. It goes no further than where it is then."""
        last = self._random.randrange(sent.reached)
        if last < len(sent.made) and last < sent.reached - 1:
            sent.made, sent.raises = sent.made[: last + 1], False
        for i in range(len(sent.relay.instances)):
            if i != last and self._random.random() < 0.8:
                self._at(self.time + self._random.randint(0, ns + 20), partial(self._fenced, sent, i))

    def _fenced(self, sent: OnItsWay, i: int) -> None:
        if i in sent.left:
            self._note("is fenced off", self._models(sent.relay)[i].name)
            self._set_free(sent, [i])

    def _process_ends(self, sent: OnItsWay, i: int) -> None:
        """The process of a stop dies with it. The others are free one by one, whenever they have said where it is."""
        if i not in sent.left:
            return
        relay = sent.relay
        key, instance = self._models(relay)[i], relay.instances[i]
        self._note("dies", key.name, instance)
        self._set_free(sent, [i])
        if not sent.is_over:
            self._over_with(sent)
            self._excused.update(map(number_of, relay.batch.tickets))
            assert not self.dispatcher_of_relays.relay_failed(relay.stop(i), InstanceDied("died"))
            for other in [*sent.left]:
                self._at(self.time + self._random.randint(0, 60), partial(self._fenced, sent, other))
        self.dispatcher.take_away(self.queues[key], instance)
        self._away.add((key, instance))
        self._at(self.time + self._random.randint(0, 100), partial(self._process_is_back, key, instance))

    def _process_is_back(self, key: ModelKey, instance: int) -> None:
        self._note("is back", key.name, instance)
        self._away.remove((key, instance))
        self.dispatcher.give_back(self.queues[key], instance)

    def _come_back(self, sent: OnItsWay) -> None:
        if sent.is_over:
            return
        relay, numbers = sent.relay, [number_of(ticket) for ticket in sent.relay.batch.tickets]
        self._set_free(sent, [*sent.left])
        self._over_with(sent)
        self.relayed += len(sent.made) * len(numbers)
        for node, (_, errors) in zip(relay.way.nodes, sent.made, strict=False):
            for m, ticket in enumerate(relay.batch.tickets):
                if m not in errors and not ticket.flow.done:
                    self._finished[numbers[m]].add(node.index)
        reached = relay.way.nodes[: sent.reached]
        self._begun.update((number, node.index) for number in numbers for node in reached)
        is_whole = len(sent.made) == len(relay.way.nodes) and not sent.made[-1][1]
        if is_whole and relay.way.is_private:
            self._note("runs through", *numbers)
            self.dispatcher_of_relays.relayed(relay, sent.made[-1][0], self.time)
        elif sent.raises:
            self._raises(sent, relay.stop(len(sent.made)))
        else:
            self._note("comes back whole" if is_whole else "comes back early", *numbers)
            assert not self.dispatcher_of_relays.relay_returned(relay, sent.made, None, self.time)

    def _raises(self, sent: OnItsWay, batch: Batch) -> None:
        model = self.world.by_key[batch.queue.key]
        self._note("raises on its way", model.key.name, *map(number_of, batch.tickets))
        may_again = model.is_pure and len(batch.tickets) > 1
        if not may_again and len(batch.tickets) > 1:
            self._excused.update(map(number_of, batch.tickets))
        again = self.dispatcher_of_relays.relay_returned(sent.relay, sent.made, ModelFailed("poison"), self.time)
        assert again == (may_again and any(number_of(ticket) in self.flows for ticket in batch.tickets))
        if again:
            self._try_again(batch.tickets)

    def _try_again(self, tickets: Iterable[Ticket]) -> None:
        self._again.update(step_of(ticket) for ticket in tickets if number_of(ticket) in self.flows)

    def _set_free(self, sent: OnItsWay, stops: list[int]) -> None:
        for i in stops:
            self._busy.remove((self._models(sent.relay)[i], sent.relay.instances[i]))
            sent.left.remove(i)
        self.dispatcher_of_relays.set_free(sent.relay, stops)

    def _over_with(self, sent: OnItsWay) -> None:
        sent.is_over = True
        for i in range(len(sent.relay.instances)):
            self._running.difference_update(map(step_of, sent.relay.stop(i).tickets))

    @property
    def dispatcher_of_relays(self) -> RelayingDispatcher:
        assert isinstance(self.dispatcher, RelayingDispatcher)
        return self.dispatcher
