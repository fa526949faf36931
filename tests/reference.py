"""Plain loops from the papers. Imports nothing of the package: the oracle of its tests.

Samples are lists, one entry a sample; token tables are lists of lists. Slow on purpose.
"""

import math


def _members(group, valid):
    """Valid rows of each group that has at least two of them."""
    members = {}
    for row, (name, ok) in enumerate(zip(group, valid)):
        if ok:
            members.setdefault(name, []).append(row)
    return {name: rows for name, rows in members.items() if len(rows) > 1}


def centred_advantages(rewards, group, valid, *, leave_one_out=False):
    """r - mean of the group (arXiv 2503.20783), or of its others (arXiv 2402.14740)."""
    result = [0.0] * len(rewards)
    for rows in _members(group, valid).values():
        for row in rows:
            others = [float(rewards[o]) for o in rows if o != row or not leave_one_out]
            result[row] = float(rewards[row]) - sum(others) / len(others)
    return result


def _std(values, ddof):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def grpo_advantages(rewards, group, valid, *, ddof=1, eps=1e-6, leave_one_out=False):
    """arXiv 2402.03300: (r - mean) / std of the group."""
    result = centred_advantages(rewards, group, valid, leave_one_out=leave_one_out)
    for rows in _members(group, valid).values():
        std = _std([float(rewards[row]) for row in rows], ddof)
        for row in rows:
            result[row] /= std + eps
    return result


def batch_scaled_advantages(rewards, group, valid, *, ddof=1, eps=1e-6, leave_one_out=False):
    """arXiv 2508.08221: (r - mean of the group) / std of the batch's rewards."""
    centred = centred_advantages(rewards, group, valid, leave_one_out=leave_one_out)
    used = [float(rewards[row]) for rows in _members(group, valid).values() for row in rows]
    return [v / (_std(used, ddof) + eps) for v in centred] if used else centred


def whitened_advantages(rewards, group, valid, repeats, *, eps=1e-6, leave_one_out=False):
    """Centred by group, then whitened over the batch; a row counts `repeats` times.

    repeats = lengths: by tokens (arXiv 2501.03262); all 1: by samples.
    """
    centred = centred_advantages(rewards, group, valid, leave_one_out=leave_one_out)
    rows = [row for members in _members(group, valid).values() for row in members]
    spread = [centred[row] for row in rows for _ in range(repeats[row])]
    if not spread:
        return [0.0] * len(rewards)
    mean, std = sum(spread) / len(spread), _std(spread, 0)
    return [(centred[row] - mean) / (std + eps) if row in rows else 0.0
            for row in range(len(rewards))]


def aggregate(per_token, mask, group, *, scheme, max_length):
    """The scalar loss that each weight scheme stands for, as nested means."""
    rows = [[x for x, on in zip(xs, ons) if on] for xs, ons in zip(per_token, mask)]
    rows = [(name, row) for name, row in zip(group, rows) if row]
    if not rows:
        return 0.0
    if scheme == "token":
        return sum(sum(row) for _, row in rows) / sum(len(row) for _, row in rows)
    if scheme == "sequence":
        return sum(sum(row) / len(row) for _, row in rows) / len(rows)
    if scheme == "constant":
        return sum(sum(row) / max_length for _, row in rows) / len(rows)
    groups = {}
    for name, row in rows:
        groups.setdefault(name, []).extend(row)
    return sum(sum(tokens) / len(tokens) for tokens in groups.values()) / len(groups)


def clipped_loss(ratio, advantage, *, low, high, dual=0.0):
    """Loss of one token: -min(r A, clip(r) A), and at most -dual A for A < 0 (1912.09729)."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    value = min(ratio * advantage, clipped * advantage)
    if dual and advantage < 0:
        value = max(value, dual * advantage)
    return -value


def kl_estimate(logprob, reference, *, name, ratio=1.0):
    """Schulman's estimators of KL(p || reference) of a token from p; the last is the third times
    the token's ratio to what sampled it (arXiv 2512.02556)."""
    log_ratio = reference - logprob
    third = math.exp(log_ratio) - 1 - log_ratio
    return {"k1": -log_ratio, "k2": log_ratio ** 2 / 2, "k3": third,
            "k3_weighted": ratio * third}[name]


def importance_weight(gaps, at, *, importance, importance_mode, importance_min, importance_max):
    """Bounded weight of token `at` of a sample; `gaps` are log(old / sampled) of its tokens."""
    weight = {"none": 1.0, "token": math.exp(gaps[at]),
              "sequence": math.prod(math.exp(gap) for gap in gaps)}[importance]
    if importance == "none":
        return weight
    if importance_mode == "mask":
        return weight if importance_min <= weight <= importance_max else 0.0
    return min(max(weight, importance_min), importance_max)


def policy_loss(logprobs, old, advantages, weights, entropy, sampled, reference, *, ratio, clip_low,
                clip_high, dual_clip, entropy_coef, objective, kl_estimator, kl_coef, old_logprobs,
                **importance):
    """Sum over rows and tokens of weight x (policy loss + KL term - entropy bonus)."""
    total = 0.0
    for row in range(len(logprobs)):
        on = [t for t, weight in enumerate(weights[row]) if weight > 0]
        if not on:
            continue
        mean = sum(logprobs[row][t] - old[row][t] for t in on) / len(on)
        gaps = [old[row][t] - sampled[row][t] for t in on]
        for at, t in enumerate(on):
            own = logprobs[row][t] - old[row][t]
            r, gain = math.exp(mean if ratio == "sequence" else own), advantages[row][t]
            if ratio == "none":
                loss = -gain * logprobs[row][t]
            elif objective == "cispo":
                loss = -min(max(r, 1 - clip_low), 1 + clip_high) * gain * logprobs[row][t]
            else:
                loss = clipped_loss(r, gain, low=clip_low, high=clip_high, dual=dual_clip)
            weight = 1.0
            if old_logprobs == "recomputed":
                weight = importance_weight(gaps, at, **importance)
            kl = kl_estimate(logprobs[row][t], reference[row][t], name=kl_estimator,
                             ratio=weight * math.exp(own))
            total += weights[row][t] * (weight * loss + kl_coef * kl
                                        - entropy_coef * entropy[row][t])
    return total


def ngram_distance(a, b, longest):
    """Squared distance of two token lists by counts of their runs of 1 to `longest` tokens, each
    list's counts scaled to norm 1."""
    def features(tokens):
        counts = {}
        for order in range(1, longest + 1):
            for start in range(len(tokens) - order + 1):
                run = tuple(tokens[start:start + order])
                counts[run] = counts.get(run, 0) + 1
        norm = sum(count ** 2 for count in counts.values()) ** 0.5
        return {run: count / norm for run, count in counts.items()}

    one, other = features(a), features(b)
    return sum((one.get(run, 0) - other.get(run, 0)) ** 2 for run in one.keys() | other.keys())
