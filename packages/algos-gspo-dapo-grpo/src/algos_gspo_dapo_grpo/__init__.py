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
    aggregate_sequences,
    count_batch,
)
from algos_gspo_dapo_grpo.cispo import (
    CispoLoss,
    cispo_token_losses,
)
from algos_gspo_dapo_grpo.dapo import (
    DapoConfig,
    DapoLoss,
    dapo_token_losses,
)
from algos_gspo_dapo_grpo.decoupled_ppo import (
    DecoupledPpoLoss,
    decoupled_ppo_token_losses,
)
from algos_gspo_dapo_grpo.describe import (
    describe,
    describe_advantages,
)
from algos_gspo_dapo_grpo.diagnostics import (
    correction_metrics,
    entropy_estimate,
    max_abs_mismatch,
    mismatch_metrics,
    surrogate_metrics,
)
from algos_gspo_dapo_grpo.dppo import (
    DppoKlLoss,
    DppoTvLoss,
    dppo_token_losses,
)
from algos_gspo_dapo_grpo.dynamic_sampling import (
    DynamicSampling,
    DynamicSamplingError,
    InformativeBatch,
    InformativeBatchBuilder,
    informative_batches,
    is_informative,
)
from algos_gspo_dapo_grpo.entropy_control import (
    ClipCovLoss,
    KlCovLoss,
    clip_cov_selection,
    clip_cov_token_losses,
    kl_cov_selection,
    kl_cov_token_losses,
    token_covariances,
)
from algos_gspo_dapo_grpo.gdpo import (
    GdpoAdvantages,
    gdpo_advantages,
)
from algos_gspo_dapo_grpo.gmpo import (
    GmpoLoss,
    gmpo_sequence_losses,
)
from algos_gspo_dapo_grpo.gpg import (
    GpgAdvantages,
    GpgLoss,
    gpg_advantages,
    gpg_token_losses,
)
from algos_gspo_dapo_grpo.grpo import (
    GrpoLoss,
    grpo_token_losses,
)
from algos_gspo_dapo_grpo.gspo import (
    GspoLoss,
    gspo_sequence_losses,
)
from algos_gspo_dapo_grpo.gspo_token import (
    GspoTokenLoss,
    gspo_token_losses,
)
from algos_gspo_dapo_grpo.kl import (
    KlEstimator,
    KlLossEstimator,
    KlPenalty,
    kl_abs,
    kl_estimate,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_penalty,
)
from algos_gspo_dapo_grpo.kl_reward import (
    AdaptiveKlCoefficient,
    FixedKlCoefficient,
    KlCoefficient,
    KlInReward,
    initial_kl_coefficient,
    kl_penalised_rewards,
    next_kl_coefficient,
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
from algos_gspo_dapo_grpo.rejection import (
    RatioBand,
    Rejection,
    accepted_sequences,
    kept_mask,
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
    Bypass,
    CorrectionWeights,
    ImportanceWeighting,
    RolloutCorrection,
    SequenceTruncation,
    TokenTruncation,
    WeightMasking,
    correction_weights,
    effective_sample_fraction,
)
from algos_gspo_dapo_grpo.sapo import (
    SapoLoss,
    sapo_token_losses,
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
from algos_gspo_dapo_grpo.topr import (
    ToprLoss,
    topr_token_losses,
)
from algos_gspo_dapo_grpo.whitening import (
    whitened,
)

__all__ = [
    "AdaptiveKlCoefficient",
    "Aggregation",
    "BatchCounts",
    "Bypass",
    "CispoLoss",
    "ClipCovLoss",
    "CorrectionWeights",
    "DapoConfig",
    "DapoLoss",
    "DecoupledPpoLoss",
    "DppoKlLoss",
    "DppoTvLoss",
    "DrGrpoAdvantages",
    "DynamicSampling",
    "DynamicSamplingError",
    "FixedKlCoefficient",
    "FixedNormaliser",
    "Gae",
    "GaeEstimate",
    "GdpoAdvantages",
    "GmpoLoss",
    "GpgAdvantages",
    "GpgLoss",
    "GroupAdvantages",
    "GrpoAdvantages",
    "GrpoLoss",
    "GspoLoss",
    "GspoTokenLoss",
    "ImportanceWeighting",
    "InformativeBatch",
    "InformativeBatchBuilder",
    "KlCoefficient",
    "KlCovLoss",
    "KlEstimator",
    "KlInReward",
    "KlLossEstimator",
    "KlPenalty",
    "LossShare",
    "MaxRlAdvantages",
    "PolicyLoss",
    "RatioBand",
    "ReinforcePlusPlusAdvantages",
    "Rejection",
    "RlooAdvantages",
    "RolloutCorrection",
    "SapoLoss",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "SequenceTruncation",
    "Sequences",
    "SoftOverlong",
    "Surrogate",
    "TokenAdvantages",
    "TokenMean",
    "TokenTruncation",
    "ToprLoss",
    "WeightMasking",
    "accepted_sequences",
    "aggregate",
    "aggregate_sequences",
    "cispo_token_losses",
    "clip_cov_selection",
    "clip_cov_token_losses",
    "clipped_surrogate",
    "correction_metrics",
    "correction_weights",
    "count_batch",
    "dapo_token_losses",
    "decoupled_ppo_token_losses",
    "describe",
    "describe_advantages",
    "dppo_token_losses",
    "dr_grpo_advantages",
    "effective_sample_fraction",
    "entropy_estimate",
    "gae",
    "gdpo_advantages",
    "gmpo_sequence_losses",
    "gpg_advantages",
    "gpg_token_losses",
    "group_advantages",
    "group_ids_of",
    "grpo_advantages",
    "grpo_token_losses",
    "gspo_sequence_losses",
    "gspo_token_losses",
    "informative_batches",
    "initial_kl_coefficient",
    "is_informative",
    "kept_mask",
    "kl_abs",
    "kl_cov_selection",
    "kl_cov_token_losses",
    "kl_estimate",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_penalised_rewards",
    "kl_penalty",
    "max_abs_mismatch",
    "maxrl_advantages",
    "mismatch_metrics",
    "next_kl_coefficient",
    "opo_advantages",
    "outcome_token_rewards",
    "policy_loss",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "reward_to_go",
    "rloo_advantages",
    "sapo_token_losses",
    "soft_overlong_penalty",
    "surrogate_metrics",
    "token_covariances",
    "topr_token_losses",
    "whitened",
]
