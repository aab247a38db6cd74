"""GRPO, DAPO and GSPO: advantages, policy losses and aggregation as pure functions of tensors."""

from algos_gspo_dapo_grpo.advantages import (
    DrGrpoAdvantages,
    GroupAdvantages,
    GrpoAdvantages,
    dr_grpo_advantages,
    group_advantages,
    group_ids_of,
    grpo_advantages,
)
from algos_gspo_dapo_grpo.aggregation import (
    Aggregation,
    BatchCounts,
    FixedNormaliser,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
    aggregate,
    count_batch,
)
from algos_gspo_dapo_grpo.dapo import (
    DapoConfig,
    DapoLoss,
    dapo_token_losses,
)
from algos_gspo_dapo_grpo.describe import (
    describe,
)
from algos_gspo_dapo_grpo.diagnostics import (
    max_abs_mismatch,
    mismatch_metrics,
    surrogate_metrics,
)
from algos_gspo_dapo_grpo.dynamic_sampling import (
    DynamicSampling,
    DynamicSamplingError,
    InformativeBatch,
    InformativeBatchBuilder,
    informative_batches,
    is_informative,
)
from algos_gspo_dapo_grpo.gdpo import (
    GdpoAdvantages,
    gdpo_advantages,
)
from algos_gspo_dapo_grpo.gpg import (
    GpgAdvantages,
    gpg_advantages,
)
from algos_gspo_dapo_grpo.grpo import (
    GrpoLoss,
    grpo_token_losses,
)
from algos_gspo_dapo_grpo.gspo import (
    GspoLoss,
    gspo_sequence_losses,
)
from algos_gspo_dapo_grpo.kl import (
    KlPenalty,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_penalty,
)
from algos_gspo_dapo_grpo.maxrl import (
    MaxRlAdvantages,
    maxrl_advantages,
)
from algos_gspo_dapo_grpo.opo import (
    opo_advantages,
)
from algos_gspo_dapo_grpo.overlong import (
    SoftOverlong,
    soft_overlong_penalty,
)
from algos_gspo_dapo_grpo.policy_loss import (
    LossShare,
    PolicyLoss,
    policy_loss,
)
from algos_gspo_dapo_grpo.reinforce_plus_plus import (
    ReinforcePlusPlusAdvantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from algos_gspo_dapo_grpo.remax import (
    remax_advantages,
)
from algos_gspo_dapo_grpo.returns import (
    Gae,
    GaeEstimate,
    gae,
    outcome_token_rewards,
    reward_to_go,
)
from algos_gspo_dapo_grpo.rloo import (
    RlooAdvantages,
    rloo_advantages,
)
from algos_gspo_dapo_grpo.rollout_correction import (
    TokenTruncation,
    truncated_weights,
)
from algos_gspo_dapo_grpo.sequences import (
    Sequences,
)
from algos_gspo_dapo_grpo.surrogate import (
    Surrogate,
    clipped_surrogate,
)
from algos_gspo_dapo_grpo.token_advantages import (
    TokenAdvantages,
)
from algos_gspo_dapo_grpo.whitening import (
    whitened,
)

__all__ = [
    "Aggregation",
    "BatchCounts",
    "DapoConfig",
    "DapoLoss",
    "DrGrpoAdvantages",
    "DynamicSampling",
    "DynamicSamplingError",
    "FixedNormaliser",
    "Gae",
    "GaeEstimate",
    "GdpoAdvantages",
    "GpgAdvantages",
    "GroupAdvantages",
    "GrpoAdvantages",
    "GrpoLoss",
    "GspoLoss",
    "InformativeBatch",
    "InformativeBatchBuilder",
    "KlPenalty",
    "LossShare",
    "MaxRlAdvantages",
    "PolicyLoss",
    "ReinforcePlusPlusAdvantages",
    "RlooAdvantages",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "Sequences",
    "SoftOverlong",
    "Surrogate",
    "TokenAdvantages",
    "TokenMean",
    "TokenTruncation",
    "aggregate",
    "clipped_surrogate",
    "count_batch",
    "dapo_token_losses",
    "describe",
    "dr_grpo_advantages",
    "gae",
    "gdpo_advantages",
    "gpg_advantages",
    "group_advantages",
    "group_ids_of",
    "grpo_advantages",
    "grpo_token_losses",
    "gspo_sequence_losses",
    "informative_batches",
    "is_informative",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_penalty",
    "max_abs_mismatch",
    "maxrl_advantages",
    "mismatch_metrics",
    "opo_advantages",
    "outcome_token_rewards",
    "policy_loss",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "reward_to_go",
    "rloo_advantages",
    "soft_overlong_penalty",
    "surrogate_metrics",
    "truncated_weights",
    "whitened",
]
