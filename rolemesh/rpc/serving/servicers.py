"""Base classes of servicers, one for each service. Generated from proto/ by `make proto`; do not edit.

A servicer that lacks an rpc, or misspells one, cannot be made. The guard has read the request: `stream Frame`
is one batch. A stream of frames is answered with batches, or with frames as bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolemesh.dataproto import DataProto
    from rolemesh.rpc.serving.handlers import Context
    from rolemesh.v1 import actor_pb2, checkpoint_pb2, controller_pb2, environment_pb2, rollout_pb2, weights_pb2


class ActorServiceBase(ABC):
    """ActorService; actor.proto describes its rpcs."""

    @abstractmethod
    def ComputeLogProbs(self, batch: DataProto, context: Context, /) -> AsyncIterator[DataProto | bytes]: ...

    @abstractmethod
    def ComputeRefLogProbs(self, batch: DataProto, context: Context, /) -> AsyncIterator[DataProto | bytes]: ...

    @abstractmethod
    async def Update(self, batch: DataProto, context: Context, /) -> checkpoint_pb2.UpdateResponse: ...

    @abstractmethod
    async def PublishWeights(
        self, request: actor_pb2.PublishWeightsRequest, context: Context, /
    ) -> actor_pb2.PublishWeightsResponse: ...

    @abstractmethod
    async def BeginCheckpoint(
        self, request: checkpoint_pb2.BeginCheckpointRequest, context: Context, /
    ) -> checkpoint_pb2.BeginCheckpointResponse: ...

    @abstractmethod
    async def FinishCheckpoint(
        self, request: checkpoint_pb2.FinishCheckpointRequest, context: Context, /
    ) -> checkpoint_pb2.FinishCheckpointResponse: ...

    @abstractmethod
    async def LoadCheckpoint(
        self, request: checkpoint_pb2.LoadCheckpointRequest, context: Context, /
    ) -> checkpoint_pb2.LoadCheckpointResponse: ...


class ControllerServiceBase(ABC):
    """ControllerService; controller.proto describes its rpcs."""

    @abstractmethod
    async def GetStatus(
        self, request: controller_pb2.GetStatusRequest, context: Context, /
    ) -> controller_pb2.GetStatusResponse: ...

    @abstractmethod
    def WatchStatus(
        self, request: controller_pb2.WatchStatusRequest, context: Context, /
    ) -> AsyncIterator[controller_pb2.WatchStatusResponse]: ...

    @abstractmethod
    def Watch(
        self, request: controller_pb2.WatchRequest, context: Context, /
    ) -> AsyncIterator[controller_pb2.WatchResponse]: ...

    @abstractmethod
    async def Pause(
        self, request: controller_pb2.PauseRequest, context: Context, /
    ) -> controller_pb2.PauseResponse: ...

    @abstractmethod
    async def Resume(
        self, request: controller_pb2.ResumeRequest, context: Context, /
    ) -> controller_pb2.ResumeResponse: ...

    @abstractmethod
    async def Stop(
        self, request: controller_pb2.StopRequest, context: Context, /
    ) -> controller_pb2.StopResponse: ...


class CriticServiceBase(ABC):
    """CriticService; critic.proto describes its rpcs."""

    @abstractmethod
    def ComputeValues(self, batch: DataProto, context: Context, /) -> AsyncIterator[DataProto | bytes]: ...

    @abstractmethod
    async def Update(self, batch: DataProto, context: Context, /) -> checkpoint_pb2.UpdateResponse: ...

    @abstractmethod
    async def BeginCheckpoint(
        self, request: checkpoint_pb2.BeginCheckpointRequest, context: Context, /
    ) -> checkpoint_pb2.BeginCheckpointResponse: ...

    @abstractmethod
    async def FinishCheckpoint(
        self, request: checkpoint_pb2.FinishCheckpointRequest, context: Context, /
    ) -> checkpoint_pb2.FinishCheckpointResponse: ...

    @abstractmethod
    async def LoadCheckpoint(
        self, request: checkpoint_pb2.LoadCheckpointRequest, context: Context, /
    ) -> checkpoint_pb2.LoadCheckpointResponse: ...


class EnvironmentServiceBase(ABC):
    """EnvironmentService; environment.proto describes its rpcs."""

    @abstractmethod
    async def Describe(
        self, request: environment_pb2.DescribeRequest, context: Context, /
    ) -> environment_pb2.DescribeResponse: ...

    @abstractmethod
    async def OpenEpisode(
        self, request: environment_pb2.OpenEpisodeRequest, context: Context, /
    ) -> environment_pb2.OpenEpisodeResponse: ...

    @abstractmethod
    async def Act(
        self, request: environment_pb2.ActRequest, context: Context, /
    ) -> environment_pb2.ActResponse: ...

    @abstractmethod
    async def CloseEpisode(
        self, request: environment_pb2.CloseEpisodeRequest, context: Context, /
    ) -> environment_pb2.CloseEpisodeResponse: ...


class ReferenceServiceBase(ABC):
    """ReferenceService; reference.proto describes its rpcs."""

    @abstractmethod
    def ComputeLogProbs(self, batch: DataProto, context: Context, /) -> AsyncIterator[DataProto | bytes]: ...


class RewardServiceBase(ABC):
    """RewardService; reward.proto describes its rpcs."""

    @abstractmethod
    def ComputeScores(self, batch: DataProto, context: Context, /) -> AsyncIterator[DataProto | bytes]: ...


class RolloutServiceBase(ABC):
    """RolloutService; rollout.proto describes its rpcs."""

    @abstractmethod
    def Generate(self, batch: DataProto, context: Context, /) -> AsyncIterator[DataProto | bytes]: ...

    @abstractmethod
    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Context, /
    ) -> rollout_pb2.UpdateWeightsResponse: ...


class WeightsServiceBase(ABC):
    """WeightsService; weights.proto describes its rpcs."""

    @abstractmethod
    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context, /
    ) -> weights_pb2.GetManifestResponse: ...

    @abstractmethod
    def FetchRange(
        self, request: weights_pb2.FetchRangeRequest, context: Context, /
    ) -> AsyncIterator[DataProto | bytes]: ...

    @abstractmethod
    def WatchRegion(
        self, request: weights_pb2.WatchRegionRequest, context: Context, /
    ) -> AsyncIterator[weights_pb2.WatchRegionResponse]: ...
