"""The decoding loop: draft, verify, keep what is accepted, draw one token more; for every batch size and rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .acceptance import AcceptanceRule
from .cached_model import CachedModel
from .counters import Recorder, Round
from .draft_length import Schedule
from .drafting import Drafts, DraftSource, no_drafts
from .kl_budget import has_budget, spent
from .law import emitted_divergence
from .logits import BlockProcessor
from .outputs import TokenRows
from .parameters import select_rows
from .randomness import Uniforms
from .ranks import ALONE, Ranks
from .sequences import Sequences
from .stopping import Stopping
from .verification import Verification, bad_target_error, match_greedy, verify_block, warn_bad_draft


@dataclass
class Decoder:
    """One call's decoding, with everything it needs.

    Args:
        first_logits (`torch.Tensor` of shape [B, V]): the target's behind the prompts.
        target (`CachedModel`): the model whose law counts, holding the prompts.
        source (`DraftSource`): what drafts.
        sequences (`Sequences`): the token ids, prompts to begin with.
        rule (`AcceptanceRule`, *optional*): `None` decodes greedily, which is the same under every rule.
        processors (`BlockProcessor`): what turns the target's logits into the law to sample from.
        schedule (`Schedule`): how many tokens to draft.
        stopping (`Stopping`): where rows end.
        uniforms (`Uniforms`): the random numbers.
        recorder (`Recorder`): the counts.
        ranks (`Ranks`): the processes that decode together.
        streamer (`BaseStreamer`, *optional*): gets the tokens of a single row as soon as they are committed.
        scores, raw_logits (`TokenRows`, *optional*): collect the target's processed and unprocessed logits.
        has_finished (`bool`): whether all rows have ended; then it only makes passes that other processes need.
    """

    first_logits: Tensor
    target: CachedModel
    source: DraftSource
    sequences: Sequences
    rule: AcceptanceRule | None
    processors: BlockProcessor
    schedule: Schedule
    stopping: Stopping
    uniforms: Uniforms
    recorder: Recorder
    ranks: Ranks = ALONE
    streamer: Any = None
    scores: TokenRows | None = None
    raw_logits: TokenRows | None = None
    has_finished: bool = False
    has_warned: bool = False

    def run(self) -> CachedModel:
        """Decode until every row has ended; the target, holding what the last of them left."""
        if not self.has_finished:
            self._first_token(self.first_logits[:, None])
        while self.ranks.most(not self.has_finished):
            if self.has_finished:
                self._idle()
            else:
                self._round()
        return self.target

    def _first_token(self, logits: Tensor) -> None:
        none = no_drafts(self.sequences)
        verdict, target_logits = self._verify(logits, none, self._draws(0))
        first = self._commit(verdict, none, logits, target_logits)
        self.recorder.add_first(first.rows, first.num_emitted)
        self._publish(first)

    def _round(self) -> None:
        lengths = self.schedule.lengths(self.sequences.rows, self.sequences.remaining())
        num_drafts = max(lengths.tolist())
        draws = self._draws(num_drafts)
        if num_drafts > 0 or self.ranks.is_synced:
            drafts = self.source.propose(self.sequences, lengths, draws[:, :num_drafts])
        else:
            drafts = no_drafts(self.sequences)
        logits = self.target.score(self._with_last(drafts), self.sequences.slots(-1))
        verdict, target_logits = self._verify(logits, drafts, draws[:, num_drafts:])
        divergence = self._divergence(verdict, target_logits, drafts)
        round = self._commit(verdict, drafts, logits, target_logits, *divergence)
        self.schedule.update(round.rows, round.num_drafted, round.num_accepted)
        self.recorder.add(round)
        self._publish(round)

    def _idle(self) -> None:
        """Make the passes of a round for the sake of other processes, with rows that have ended."""
        none = torch.zeros_like(self.sequences.rows)
        self.source.propose(self.sequences, none, torch.empty(len(none), 0, dtype=torch.float64))
        self.target.score(self.sequences.read(-1, 1), self.sequences.slots(-1))

    def _draws(self, num_drafts: int) -> Tensor:
        return self.uniforms.draws(self.sequences.row_index, self.sequences.position(), num_drafts)

    def _with_last(self, drafts: Drafts) -> Tensor:
        """The block the target reads: the last committed token, whose law is still unknown, and the drafts."""
        return torch.cat([self.sequences.read(-1, 1), drafts.tokens], dim=1)

    def _verify(self, logits: Tensor, drafts: Drafts, uniforms: Tensor) -> tuple[Verification, Tensor]:
        # Processors may write into what they are given, and the raw logits may be asked for
        target_logits = self.processors(logits if self.raw_logits is None else logits.clone(), self.sequences)
        if self.rule is None:
            return match_greedy(target_logits, drafts.tokens, drafts.lengths), target_logits
        tokens, laws, lengths, normaliser = drafts
        num_drafts = tokens.shape[1]
        if uniforms.shape[1] > num_drafts + 1:  # the draft has stopped short of its length
            uniforms = torch.cat([uniforms[:, :num_drafts], uniforms[:, -1:]], dim=1)
        return verify_block(target_logits, tokens, laws, self.rule, lengths, uniforms, normaliser), target_logits

    def _divergence(self, verdict: Verification, target_logits: Tensor, drafts: Drafts) -> tuple[Tensor, ...]:
        """The emitted law's KL and TV [B, m], if asked for; what they take of a budget is gone for the next rounds."""
        if has_budget(self.rule) and verdict.emitted_kl is not None and verdict.emitted_tv is not None:
            self.rule = spent(self.rule, verdict.emitted_kl.sum(1))
            return verdict.emitted_kl, verdict.emitted_tv
        if not self.recorder.with_emitted:
            return ()
        if self.rule is None:
            none = torch.zeros(drafts.tokens.shape, dtype=torch.float64, device=drafts.tokens.device)
            return none, none
        return emitted_divergence(target_logits[:, :-1], drafts.logits, self.rule, draft_tokens=drafts.tokens)

    def _commit(
        self, verdict: Verification, drafts: Drafts, logits: Tensor, target_logits: Tensor, *divergence: Tensor
    ) -> Round:
        """Keep the accepted drafts and the next token, up to where the row ends. Holds the round's one host sync."""
        block = torch.cat([drafts.tokens, verdict.next_token[:, None]], dim=1)
        block.scatter_(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
        num_emitted, has_ended = self.stopping.cut(block, verdict.num_accepted + 1)
        scalars = [
            num_emitted,
            has_ended,
            verdict.num_accepted,
            verdict.draft_lengths,
            drafts.lengths,
            verdict.bad_target,
        ]
        arrays = [verdict.is_boosted, verdict.ball_kl, *divergence]

        decided = self.ranks.same(torch.cat([block, torch.stack(scalars, 1), *arrays], dim=1).double())
        num_drafts = drafts.tokens.shape[1]
        self.sequences.write(0, decided[:, : num_drafts + 1].long())
        host = decided.cpu()
        widths = [num_drafts + 1, len(scalars), *[num_drafts] * len(arrays)]
        tokens, counts, is_boosted, *divergence = host.split(widths, dim=1)
        tokens, counts = tokens.long(), counts.long()
        self._check(counts, target_logits)
        num_emitted, has_ended, num_accepted, num_drafted, *_ = counts.unbind(1)
        rows, begin = self.sequences.rows, self.sequences.num_generated()
        for collector, values in ((self.scores, target_logits), (self.raw_logits, logits)):
            if collector is not None:  # criteria look at the scores, so the output forgets what they cut off
                collector.add(rows, begin, num_emitted, values)
        num_emitted, has_ended = self.stopping.cut_by_criteria(
            self.sequences, num_emitted, has_ended.bool(), self.scores
        )
        self.sequences.commit(tokens, num_emitted)
        has_ended = has_ended | (self.sequences.remaining() <= 0)
        return Round(
            rows,
            begin,
            tokens,
            num_emitted,
            has_ended,
            num_accepted,
            num_drafted,
            is_boosted.bool(),
            torch.stack(divergence),
        )

    def _check(self, counts: Tensor, target_logits: Tensor) -> None:
        """Raises or warns where laws were none, by `counts` [B, 6] of `_commit`.

        Where the target allows no token behind drafts, the block is cut there, by changing `counts`: the drafts may
        have ended the text, or be what a processor does not take. Else the next round begins there, and fails as plain
        decoding would.
        """
        for b, (num_emitted, has_ended, _, num_drafted, num_proposed, place) in enumerate(counts.tolist()):
            if num_drafted < num_proposed and not self.has_warned:
                self.has_warned = True
                warn_bad_draft()
            if place < 0:
                continue
            is_empty = target_logits[b, place].amax() == -torch.inf
            if place == 0 or not self.ranks.same(is_empty):
                raise bad_target_error(int(self.sequences.rows[b]), place)
            counts[b, :3] = torch.tensor([min(num_emitted, place), has_ended and num_emitted <= place, place])

    def _publish(self, round: Round) -> None:
        """Hand out what was committed, and let finished rows go."""
        if self.streamer is not None:
            count = int(round.num_emitted[0])
            tokens = round.tokens[0, :count]
            if hasattr(self.streamer, "put_block"):
                self.streamer.put_block(tokens, self.recorder.last_kinds(count))
            else:
                for token in tokens.split(1):  # one by one, as plain decoding puts them
                    self.streamer.put(token)
        self._let_go(round.has_ended)

    def _let_go(self, has_ended: Tensor) -> None:
        ended = has_ended.tolist()
        if not any(ended):
            return
        if all(ended):
            self.has_finished = True
            return
        index = (~has_ended).nonzero()[:, 0]
        for each in (self.sequences, self.target, self.source):
            each.keep(index)
        self.rule = None if self.rule is None else select_rows(self.rule, index)
