from lightning_accel.planning.hardware import DEVICES as DEVICES
from lightning_accel.planning.hardware import Cluster as Cluster
from lightning_accel.planning.hardware import Device as Device
from lightning_accel.planning.program import Plan as Plan
from lightning_accel.planning.program import plan as plan
from lightning_accel.planning.simulation import Simulation as Simulation
from lightning_accel.planning.simulation import SimulationError as SimulationError
from lightning_accel.planning.simulation import simulate_step as simulate_step
