from lightning_accel.diagnosis.diagnosing import Diagnosis as Diagnosis
from lightning_accel.diagnosis.diagnosing import diagnose as diagnose
from lightning_accel.diagnosis.diagnosing import doctor as doctor
from lightning_accel.diagnosis.examination import Examined as Examined
from lightning_accel.diagnosis.examination import TooShortError as TooShortError
from lightning_accel.diagnosis.examination import examine as examine
from lightning_accel.diagnosis.findings import Finding as Finding
from lightning_accel.diagnosis.findings import find_slowness as find_slowness
