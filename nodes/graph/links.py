"""The VAEs that a model's latents meet in a graph, read from the links before anything runs.

Switches are followed as the graph will run (`switches.py`). The search goes from a loader's MODEL to
the samplers that take it, from their latents down to the node that decodes them and up to the node
that encoded them, and from there to the VAE's loader.

Only a plain way is followed, because a false alarm would stop a correct run. The search ends where
two models meet in one node, and where a node of another pack makes latents of latents, which may
then be of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from .prompt import ANY, IMAGE, LATENT, MODEL, MODELS, VAE, Kind, Output, Prompt, Unknown, is_link, output_of
from .sizes import size_of
from .switches import followed
from .time_limit import endless
from .values import Values


class Graph:
    """A graph, read from its links. Its `prompt` is without the switches that are known.

    prompt   in API form
    kind_of  a class of nodes by its name; None: unknown
    ends     the end nodes that will run; None: all
    go_on    called at each node that is looked at; raises where it is enough
    """

    def __init__(
        self,
        prompt: Prompt,
        kind_of: Callable[[str], Kind | None],
        ends: Collection[str] | None = None,
        go_on: Callable[[], None] = endless,
    ) -> None:
        self._go_on = go_on
        self._links: dict[str, Sequence[Output]] = {}
        self._types: dict[Output, str] = {}
        self._kinds = {
            name: kind_of(str(node.get("class_type"))) or Kind((), is_plain=False) for name, node in prompt.items()
        }
        self.prompt: Prompt = followed(prompt, Values(prompt, self._kinds), go_on)
        self.values = Values(self.prompt, self._kinds, self._decoded)
        self.running = self._running(ends)
        self._takers: dict[Output, list[str]] = {}
        for name in self.running:
            for output in self.links(name):
                self._takers.setdefault(output, []).append(name)

    def links(self, node: str) -> Sequence[Output]:
        """The outputs of other nodes that this node takes."""
        self._go_on()
        if node not in self._links:
            values = self.prompt.get(node, {}).get("inputs", {}).values()
            found = (output_of(value) for value in values if is_link(value))
            self._links[node] = [output for output in found if output.node in self.prompt]
        return self._links[node]

    def type_of(self, output: Output) -> str:
        """The type of an output. A node that passes any type on, such as a reroute, has its input's
        type."""
        seen: dict[Output, None] = {}
        type = ANY
        while output not in self._types and output not in seen:
            seen[output] = None
            outputs = self._kinds[output.node].outputs
            type = outputs[output.place] if 0 <= output.place < len(outputs) else ""
            before = self.links(output.node)
            if type != ANY or len(before) != 1:
                break
            output = before[0]
        found = self._types.get(output, type)
        self._types.update(dict.fromkeys(seen, found))
        return found

    def links_of(self, node: str, *types: str) -> Sequence[Output]:
        return [output for output in self.links(node) if self.type_of(output) in types]

    def made(self, node: str) -> Sequence[str]:
        """The types of a node's outputs, in order."""
        return [self.type_of(Output(node, place)) for place in range(len(self._kinds[node].outputs))]

    def is_plain(self, node: str) -> bool:
        return self._kinds[node].is_plain

    def is_taken(self, node: str, place: int) -> bool:
        """Whether a node that will run takes this output."""
        return bool(self._takers.get(Output(node, place)))

    def vaes(self, loader: str) -> Iterator[str]:
        """The nodes that load the VAEs which latents of this loader's model meet."""
        for vae in self._vaes_met(loader):
            found = self._loader_of(vae)
            if found is not None:
                yield found

    def _decoded(self, node: str) -> tuple[int, int, int]:
        """Count, height and width of the pictures that a node decodes. Raises `Unknown`."""
        found = size_of(self, node)
        if found.sound:
            raise Unknown("computed", node)
        frames, height, width = found.pixels
        return max(1, frames) * found.batch, height, width

    def _running(self, ends: Collection[str] | None) -> set[str]:
        """The nodes that end nodes depend on, and these."""
        asked = [name for name in self.prompt if self._kinds[name].is_end and (ends is None or name in ends)]
        running: set[str] = set()
        while asked:
            name = asked.pop()
            if name not in running:
                running.add(name)
                asked += [output.node for output in self.links(name)]
        return running

    def _vaes_met(self, loader: str) -> Iterator[Output]:
        seen: set[tuple[Output, str]] = set()
        waiting = [(Output(loader, 0), MODEL)]
        while waiting:
            step = waiting.pop()
            if step in seen:
                continue
            seen.add(step)
            output, type = step
            for node in self._takers.get(output, ()):
                if type == LATENT:
                    yield from self._one_vae(node)
                    goes_on = self._passes_latents(node)
                else:
                    goes_on = len(self.links_of(node, *MODELS, ANY)) == 1
                    kind = self._kinds[node]
                    if goes_on and LATENT in kind.outputs:  # it samples
                        yield from self._encoders(node)
                    elif (
                        goes_on and IMAGE in kind.outputs and kind.is_plain
                    ):  # and decodes: no latents leave it for another node
                        yield from self._one_vae(node)
                if goes_on:
                    waiting += self._outputs(node, type)

    def _outputs(self, node: str, type: str) -> Iterator[tuple[Output, str]]:
        """The outputs on which an input of this type goes on, with their types."""
        for place in range(len(self._kinds[node].outputs)):
            made = self.type_of(Output(node, place))
            if made == LATENT or (made in MODELS and type in MODELS):
                yield Output(node, place), made

    def _passes_latents(self, node: str) -> bool:
        """Whether a node passes latents on. If it takes a model, its latents are of that model."""
        is_alone = len(self.links_of(node, LATENT, ANY)) == 1 and not self.links_of(node, *MODELS)
        return is_alone and (self._kinds[node].is_plain or ANY in self._kinds[node].outputs)

    def _encoders(self, sampler: str) -> Iterator[Output]:
        """The VAEs that encoded a sampler's first latents. An empty latent has none."""
        seen: set[Output] = set()
        waiting = list(self.links_of(sampler, LATENT))
        while waiting:
            output = waiting.pop()
            if output in seen:
                continue
            seen.add(output)
            if self.links_of(output.node, IMAGE):
                yield from self._one_vae(output.node)
            elif self._passes_latents(output.node):
                waiting += self.links_of(output.node, LATENT)

    def _one_vae(self, node: str) -> Iterator[Output]:
        """The only VAE of a node. With two, one may be for sound."""
        found = self.links_of(node, VAE, ANY)
        if len(found) == 1:
            yield found[0]

    def _loader_of(self, vae: Output) -> str | None:
        """The node that loads this VAE, if no node on the way could change it."""
        seen: set[Output] = set()
        while vae not in seen:
            seen.add(vae)
            before = self.links(vae.node)
            if not before:
                return vae.node
            within = self.links_of(vae.node, VAE, ANY)
            if len(within) != 1 or not (self._kinds[vae.node].is_plain or len(before) == 1):
                return None
            vae = within[0]
        return None
